"""Check of inverse_sqrt.md: `python benchmarks/change_cost/inverse_sqrt.py [TREE]`."""

from __future__ import annotations

import math
import tempfile
from pathlib import Path
from typing import Any

from checking import is_accepted, is_near, require, require_keys, require_same_losses, train

KIND = "--lr_scheduler.decay_type=inverse_sqrt"
PEAK = 0.01
SAVES = ("--checkpoint.enable_checkpoint", "--checkpoint.interval=100")


def rate(step: int, warmup: int) -> float:
    """Return the rate of a step, counted from 1."""
    done = step - 1
    if done < warmup:
        return PEAK * (done + 1) / (warmup + 1)
    return PEAK * math.sqrt(max(warmup, 1) / max(done, 1))


def require_rates(rows: list[dict[str, Any]], warmup: int, floor: float = 0.0) -> None:
    for row in rows:
        wanted = max(rate(row["step"], warmup), floor)
        right = is_near(row["lr"], wanted, 1e-6)
        require(right, f"warm-up {warmup}: lr of step {row['step']} is {row['lr']}, not {wanted}")


def main() -> None:
    require_keys(KIND)
    for key in ("decay_ratio=0.5", "decay_steps=5", "plateau_ratio=0.5", "min_lr_factor=0.1"):
        require(not is_accepted(KIND, f"--lr_scheduler.{key}"), f"{key} is taken, and does nothing")
    flags = (KIND, f"--optimizer.lr={PEAK}", "--training.warmup_steps=4")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        whole = train(folder / "whole", 2, *flags, "--training.steps=14")
        require(len(whole) == 14, "a step was not logged")
        require_rates(whole, 4)
        train(folder / "parts", 2, *flags, *SAVES, "--training.steps=7")
        parts = train(folder / "parts", 2, *flags, *SAVES, "--training.steps=14")
        require_same_losses("resumed with more steps", parts, whole, 0.0)
        require_rates(parts, 4)
        bare = (*flags[:2], "--training.warmup_steps=0", "--lr_scheduler.min_lr=0.004")
        require_rates(train(folder / "bare", 1, *bare, "--training.steps=9"), 0, floor=0.004)
    print("right: the rates, their resume, the floor and the refusals")


if __name__ == "__main__":
    main()
