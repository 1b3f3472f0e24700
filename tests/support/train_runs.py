"""Small runs of `train.py` whose ranks are real processes, and what is compared of them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.support import ranks as local_ranks
from tests.support.faults import NO_FAULT, Fault
from tests.support.tiny import EIGHT_STEPS
from titanlite import exit_codes
from titanlite.checkpoint.manifest import read_manifest
from titanlite.data.batch_hash import add_hashes
from titanlite.runs.read_jsonl import read_lines, read_metrics

STEPS = 8
INTERVAL = 2
TINY = [
    "--job.config_file=debug_model.toml",
    *EIGHT_STEPS,
    f"--training.steps={STEPS}",
    "--no-validation.enable",
    "--checkpoint.enable_checkpoint",
    f"--checkpoint.interval={INTERVAL}",
]


def flags(folder: Path, *more: str) -> list[str]:
    return [*TINY, f"--job.dump_folder={folder}", *more]


def train(
    arguments: Sequence[str], ranks: int, console: Path, fault: Fault = NO_FAULT
) -> tuple[list[int], str]:
    """Train to the end, and log the batches of each step (see `batches`).

    Exit codes by rank, and the output.
    """
    return local_ranks.train(arguments, ranks, console, fault, main="tests.support.logged")


def finish(arguments: Sequence[str], ranks: int, console: Path, fault: Fault = NO_FAULT) -> str:
    """Train to the end, where every rank must succeed; return the output."""
    codes, text = train(arguments, ranks, console, fault)
    assert codes == [exit_codes.DONE] * ranks, text
    return text


def rows(folder: Path) -> list[tuple[Any, ...]]:
    """What metrics.jsonl has of each step, but for times and memory."""
    return [
        (row["step"], row["loss"], row["grad_norm"], row["lr"], row["tokens_seen"])
        for row in read_metrics(folder / "metrics.jsonl")
    ]


def batches(folder: Path, ranks: int) -> list[dict[int, str]]:
    """Step -> hash of what it was trained on, by rank; of a step that was trained again, the last
    time.
    """
    return [
        {row["step"]: row["batch"] for row in read_lines(folder / f"batches.{rank}")}
        for rank in range(ranks)
    ]


def global_batches(folder: Path, ranks: int) -> dict[int, str]:
    """Step -> hash of all sequences of it, whichever rank had them."""
    by_rank = batches(folder, ranks)
    return {step: add_hashes(mine[step] for mine in by_rank) for step in by_rank[0]}


def unequal(left: Path, right: Path, step: int = STEPS) -> list[str]:
    """Tensors of the checkpoints of a step that are not the same bit for bit in the two runs."""
    from tests.support import checkpoints  # which imports torch

    folders = [run / "checkpoint" / f"step-{step}" for run in (left, right)]
    states = []
    for folder in folders:
        train = read_manifest(folder).train
        # Each save has its own id.
        states.append({**train, "resume": train["resume"]["next_batch"]})
    assert states[0] == states[1]
    return checkpoints.unequal(*folders)


def saved(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "checkpoint").iterdir())
