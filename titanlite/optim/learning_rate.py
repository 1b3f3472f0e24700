"""The learning rate of every step of a run."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

from titanlite.optim.schedule import Schedule, learning_rate


@dataclass
class LearningRate:
    """`rate(step)` is the learning rate of a step, counted from 1.

    peak: what the schedule's factors multiply. began: steps done when the schedule began. phases: first step and
    factor of each `[[data.phase]]`, in order.
    """

    schedule: Schedule
    peak: float
    began: int = 0
    phases: tuple[tuple[int, float], ...] = ()

    def __call__(self, step: int) -> float:
        factor = next((factor for first, factor in reversed(self.phases) if first <= step), 1.0)
        return learning_rate(self.schedule, self.peak, step - self.began) * factor

    def change_length(self, before: int, steps: int) -> None:
        """The run has another number of steps; a schedule as long as the run follows it."""
        if self.schedule.total_steps == before:
            self.schedule = replace(self.schedule, total_steps=steps)

    def record(self) -> dict[str, Any]:
        """Return all numbers that rates follow from, for a checkpoint: `with_record` makes the same rates of them."""
        phases = {"phases": [list(phase) for phase in self.phases]} if self.phases else {}
        return {**asdict(self.schedule), "peak": self.peak, **phases}

    def with_record(self, record: dict[str, Any]) -> LearningRate:
        """Return a copy with the numbers of `record`."""
        own = {name: value for name, value in record.items() if name not in ("peak", "phases")}
        phases = tuple((int(first), float(factor)) for first, factor in record.get("phases", ()))
        return replace(self, schedule=replace(self.schedule, **own), peak=record.get("peak", self.peak), phases=phases)
