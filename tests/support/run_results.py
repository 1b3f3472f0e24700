"""What is compared of two runs: figures of steps and tensors of checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from titanlite.runs.lines import read_metrics


def differing(left: Path, right: Path) -> list[str]:
    """Return the tensors of two checkpoints that are not equal bit for bit."""
    # It imports torch.
    from titanlite.cli.hub.compare_checkpoints import Contents, compare

    found = compare(Contents(left), Contents(right))
    return [one.name for one in found if one.elements or one.left != one.right]


def checkpoint(run: Path, step: int) -> Path:
    """Return the folder of a checkpoint of a run."""
    return run / "checkpoint" / f"step-{step}"


def saved_steps(run: Path) -> list[int]:
    """Return the steps of the checkpoints of a run, ascending."""
    names = [path.parent.name[5:] for path in (run / "checkpoint").glob("step-*/manifest.json")]
    return sorted(int(name) for name in names if name.isdigit())


def records(run: Path, needed: str = "") -> list[tuple[Any, ...]]:
    """Return the rows of metrics.jsonl that have the figure `needed`, without times and memory."""
    kept = ("loss", "grad_norm", "lr", "tokens_seen", "validation_loss", "validation_tokens")
    found: list[tuple[Any, ...]] = []
    for row in read_metrics(run / "metrics.jsonl"):
        if not needed or needed in row:
            figures = [(key, row[key]) for key in kept if key in row]
            found.append((row["step"], *figures))
    return found
