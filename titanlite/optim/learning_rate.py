"""The learning rate of every step of a run."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

from titanlite.optim.schedule import Schedule, learning_rate


@dataclass
class LearningRate:
    """`rate(step)` is the learning rate of a step, counted from 1.

    peak: what the schedule's factors multiply. began: steps done when the schedule began.
    """

    schedule: Schedule
    peak: float
    began: int = 0

    def __call__(self, step: int) -> float:
        return learning_rate(self.schedule, self.peak, step - self.began)

    def change_length(self, before: int, steps: int) -> None:
        """The run has another number of steps; a schedule as long as the run follows it."""
        if self.schedule.total_steps == before:
            self.schedule = replace(self.schedule, total_steps=steps)

    def record(self) -> dict[str, Any]:
        """Return all numbers that rates follow from, for a checkpoint: `with_record` makes the same rates of them."""
        return {**asdict(self.schedule), "peak": self.peak}

    def with_record(self, record: dict[str, Any]) -> LearningRate:
        """Return a copy with the numbers of `record`."""
        schedule = replace(self.schedule, **{name: value for name, value in record.items() if name != "peak"})
        return replace(self, schedule=schedule, peak=record.get("peak", self.peak))
