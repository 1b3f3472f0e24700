"""The schedules of a pipeline, by name: known also where there is no pipeline. No torch here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class PipelineSchedule:
    """One schedule of `torch.distributed.pipelining`."""

    #: "one": a stage per rank. "loop": several, stage i on rank i modulo their number. "v": two,
    #: the second half of the stages in reverse order of ranks.
    stages: Literal["one", "loop", "v"]
    #: Splits each backward into one for inputs and one for weights, which fills the time that ranks
    #: would wait.
    splits_backward: bool = False


SCHEDULES = {
    "GPipe": PipelineSchedule("one"),
    "1F1B": PipelineSchedule("one"),
    "LoopedBFS": PipelineSchedule("loop"),
    "Interleaved1F1B": PipelineSchedule("loop"),
    "InterleavedZeroBubble": PipelineSchedule("loop", splits_backward=True),
    "ZBVZeroBubble": PipelineSchedule("v", splits_backward=True),
}


def find_schedule(name: str) -> str | None:
    """Return the schedule of that name, in any case of letters."""
    return next((known for known in SCHEDULES if known.lower() == name.lower()), None)
