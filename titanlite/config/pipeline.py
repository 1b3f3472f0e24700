"""The schedules of a pipeline. No torch here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Schedule:
    """One schedule of `torch.distributed.pipelining`."""

    #: "one": a stage per rank. "loop": several, stage i on rank i modulo their number. "v": two, the second half of the
    #: stages in reverse order of ranks.
    stages: Literal["one", "loop", "v"]
    #: Splits each backward into one for inputs and one for weights, which fills the time that ranks would wait.
    splits_backward: bool = False


SCHEDULES = {
    "GPipe": Schedule("one"),
    "1F1B": Schedule("one"),
    "LoopedBFS": Schedule("loop"),
    "Interleaved1F1B": Schedule("loop"),
    "InterleavedZeroBubble": Schedule("loop", splits_backward=True),
    "ZBVZeroBubble": Schedule("v", splits_backward=True),
}


def find_schedule(name: str) -> str | None:
    """The schedule of that name, in any case of letters."""
    return next((known for known in SCHEDULES if known.lower() == name.lower()), None)


def stage_count(schedule: str, degree: int, split_points: Sequence[str]) -> int:
    """Stages of the whole pipeline: as many as the split points make, else one per rank, or two."""
    if split_points:
        return len(split_points) + 1
    return degree * (1 if SCHEDULES[schedule].stages == "one" else 2)
