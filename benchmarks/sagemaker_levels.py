"""The four levels of AWS's text on torchtitan and SageMaker, beside the speeds of `titanlite plan`.

    python benchmarks/sagemaker_levels.py > levels.md

docs/launch/sagemaker.md and examples/sagemaker/3_train.ipynb have this table.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

CONFIGS = Path(__file__).resolve().parents[1] / "examples" / "sagemaker" / "config"
#: Level → what it adds; tokens per second and GPU, and loss after 2,000 steps, as published.
PUBLISHED = {
    "level1": ("default", 6475, 3.602),
    "level2": ("`torch.compile`", 7166, 3.601),
    "level3": ("float8", 8624, 3.612),
    "level4": ("float8 all-gather", 8950, 3.607),
}


def planned(level: str) -> float:
    """Return the tokens per second and GPU of a level's plan; exits if it does not fit."""
    command = ["-m", "titanlite", "plan", str(CONFIGS / f"{level}.toml"), "--json"]
    done = subprocess.run([sys.executable, *command], stdout=subprocess.PIPE, check=False)
    if done.returncode:
        sys.exit(f"{level} has no plan, or does not fit")
    speed: float = json.loads(done.stdout)["tokens_per_second"]
    return speed


def table() -> str:
    """Return the levels as a table of Markdown."""
    lines = [
        "| level | published | speed-up | `titanlite plan` | speed-up | published loss |",
        "|---|---|---|---|---|---|",
    ]
    plans = {level: planned(level) for level in PUBLISHED}
    for level, (name, speed, loss) in PUBLISHED.items():
        gains = [speed / PUBLISHED["level1"][1] - 1, plans[level] / plans["level1"] - 1]
        pairs = zip((speed, plans[level]), gains, strict=True)
        speeds = " | ".join(f"{number:,.0f} | {gain:.1%}" for number, gain in pairs)
        lines.append(f"| `{level}`: {name} | {speeds} | {loss:.3f} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
