"""Check of lion.md: `python benchmarks/change_cost/lion.py [TREE]`."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import torch
from checking import (
    TENSOR,
    command,
    is_near,
    records,
    require,
    require_keys,
    require_same_losses,
    train,
)

NAME = "--optimizer.name=Lion"
LR, BETA1, BETA2, DECAY = 0.002, 0.8, 0.95, 0.3
FLAGS = (
    NAME,
    f"--optimizer.lr={LR}",
    f"--optimizer.beta1={BETA1}",
    f"--optimizer.beta2={BETA2}",
    f"--optimizer.weight_decay={DECAY}",
    "--lr_scheduler.decay_type=constant",
    "--training.warmup_steps=0",
)
SAVES = ("--checkpoint.enable_checkpoint", "--checkpoint.interval=100")


def require_updates(layout: str, updates: list[dict[str, Any]]) -> None:
    """Compare each recorded update with the formula."""
    momenta = {name: torch.zeros_like(one) for name, one in updates[0]["before"].items()}
    require(len(updates) == 4, f"{layout}: {len(updates)} updates in 4 steps")
    for step, update in enumerate(updates, 1):
        for name, before in update["before"].items():
            gradient, momentum = update["gradients"][name], momenta[name]
            direction = BETA1 * momentum + (1 - BETA1) * gradient
            wanted = before - LR * (direction.sign() + DECAY * before)
            # The sign of what is zero to rounding may be either.
            clear = direction.abs() > 1e-6 * direction.abs().max()
            error = (update["after"][name] - wanted).abs()[clear | (direction == 0)]
            far = error.max().item() if error.numel() else 0.0
            require(far < 1e-6, f"{layout}: {name} is {far} off after step {step}")
            momenta[name] = BETA2 * momentum + (1 - BETA2) * gradient


def optimizer_memory(*flags: str) -> float:
    done = command("plan", "llama3_8b.toml", "--gpus", "8", "--gpu", "h100-80g", "--json", *flags)
    require(bool(done.stdout), f"titanlite plan fails: {done.stderr[-2000:]}")
    return float(json.loads(done.stdout)["parts"]["optimizer"])


def main() -> None:
    require_keys(NAME)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        runs = {}
        for layout, ranks, more in (("alone", 1, ()), ("FSDP", 2, ()), ("TP", 2, (TENSOR,))):
            flags = (*FLAGS, *more, "--training.steps=4")
            runs[layout] = train(folder / layout, ranks, *flags, recorder="Updates")
            for rank in records(folder / layout):
                require_updates(layout, rank["updates"])
                require(
                    rank["moments"] == rank["weights"],
                    f"{layout}: {rank['moments']} numbers of state for {rank['weights']} weights",
                )
            require_same_losses(layout, runs[layout], runs["alone"], 1e-4)
        flags = (*FLAGS, *SAVES)
        whole = train(folder / "whole", 2, *flags, "--training.steps=8")
        train(folder / "parts", 2, *flags, "--training.steps=4")
        parts = train(folder / "parts", 2, *flags, "--training.steps=6")
        require_same_losses("resumed", parts, whole[:6], 0.0)
        parts = train(folder / "parts", 1, *flags, "--training.steps=8")
        require_same_losses("resumed on one rank", parts, whole, 1e-4)
    adamw, lion = optimizer_memory(), optimizer_memory(NAME)
    require(is_near(lion, adamw / 2, 1e-3), f"plan counts {lion} GiB; AdamW has {adamw}")
    print("right: the updates alone, under FSDP and TP; the state, its resume and its memory")


if __name__ == "__main__":
    main()
