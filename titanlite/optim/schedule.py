"""The learning rate as a pure function of the step: nothing to save, nothing to drift on resume.

A schedule counts in steps, or in tokens of the run. By tokens, n is the tokens of the steps done,
and 1 below is the tokens of the step.

Three conventions. "titan" (torchtitan, autumn 2024): with n = step - 1 steps done, the warm-up is
(n + 1) / (W + 1) and the decay reaches its floor at the schedule's end. "titan-0.2" (torchtitan
0.2.x, components/lr_scheduler.py): the same decay after a warm-up of (n + 1) / W. "fsdp" (AWS FSDP
samples): with n = step, the warm-up is n / W, and W may be a fraction. The decay's progress is (n -
W) / T, which stops for the last W steps. After a plateau of P steps it is (n - W - P) / (T - W -
P).
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from titanlite.config.decays import DECAYS, Point
from titanlite.data.step_sizes import Course, Progress

if TYPE_CHECKING:
    from titanlite.data.phases import Phases


@dataclass(frozen=True)
class Schedule:
    """The numbers of a schedule, in its unit. Checkpoints hold them under these names."""

    #: Length of the schedule, not necessarily of the run; None: not known yet.
    total_steps: int | None
    #: A fraction is possible under style "fsdp".
    warmup_steps: float
    #: A key of `DECAYS`.
    decay_type: str
    style: Literal["titan", "titan-0.2", "fsdp"]
    #: The decay ends at this fraction of the peak.
    min_lr_factor: float
    #: Steps of the decay at the end of the schedule; None: all steps after the warm-up.
    decay_steps: int | None = None
    #: Steps at the peak between warm-up and decay; None: no plateau.
    plateau_steps: float | None = None
    #: Hard floor of the learning rate itself, applied after the warm-up; None: no such floor.
    min_lr: float | None = None
    #: The numbers above count tokens.
    in_tokens: bool = False

    @property
    def unit(self) -> str:
        return "tokens" if self.in_tokens else "steps"


def lr_factor(schedule: Schedule, step: int, size: int = 1) -> float:
    """Return the share of the peak learning rate at step `step`, counted from 1.

    By tokens: `step` is the tokens of the run with this step, `size` those of this step.
    """
    if schedule.total_steps is None:
        raise ValueError(
            "the length of the schedule is not known yet: derive it with the length of the text"
        )
    total, warmup = schedule.total_steps, schedule.warmup_steps
    floor = schedule.min_lr_factor
    done = step if schedule.style == "fsdp" else step - size

    def decayed(progress: float) -> float:
        point = Point(min(progress, 1.0), floor, done, warmup, size)
        return DECAYS[schedule.decay_type].share(point)

    if schedule.style == "fsdp":
        if step <= warmup:
            return step / warmup
        if schedule.plateau_steps is None:
            progress = max(min(step, total - warmup) - warmup, 0) / total
        else:
            start = warmup + schedule.plateau_steps
            progress = max(step - start, 0) / max(total - start, 1e-9)
        if schedule.decay_type == "exponential" and not floor:
            return math.exp(-0.693 * progress)  # their 1/2 at the end, to three digits
        return decayed(progress)
    if done < warmup:
        # By tokens, the end of the warm-up may lie within a step.
        return min(step / (warmup if schedule.style == "titan-0.2" else warmup + size), 1.0)
    if not DECAYS[schedule.decay_type].has_end:
        return decayed(1.0)
    rest = total - warmup - (schedule.plateau_steps or 0)
    decay_steps = rest if schedule.decay_steps is None else schedule.decay_steps
    start = total - decay_steps
    if done < start or decay_steps <= 0:
        return 1.0 if done < total else decayed(1.0)
    return decayed((done - start) / decay_steps)


def learning_rate(schedule: Schedule, peak: float, step: int, size: int = 1) -> float:
    """Return the learning rate of step `step`, counted from 1; after the warm-up at least
    `schedule.min_lr`. By tokens: see `lr_factor`.
    """
    rate = peak * lr_factor(schedule, step, size)
    if schedule.min_lr is not None and step > schedule.warmup_steps:
        return max(rate, schedule.min_lr)
    return rate


@dataclass
class LearningRate:
    """`rate(step)` is the learning rate of a step, counted from 1.

    peak: the rate that the schedule scales. began, began_tokens: steps and tokens done before it.
    phases: first step and factor of each `[[data.phase]]`, in order. peaks: first step and peak of
    those with one. course: tokens of the steps, if the schedule counts them.
    """

    schedule: Schedule
    peak: float
    began: int = 0
    phases: tuple[tuple[int, float], ...] = ()
    peaks: tuple[tuple[int, float], ...] = ()
    course: Course | None = None
    began_tokens: int = 0

    def __call__(self, step: int) -> float:
        factor = _latest(self.phases, step, 1.0)
        peak = _latest(self.peaks, step, self.peak)
        if self.course is None or not self.schedule.in_tokens:
            return learning_rate(self.schedule, peak, step - self.began) * factor
        done = self.course.tokens_after(step) - self.began_tokens
        size = self.course.size(step).tokens
        return learning_rate(self.schedule, peak, done, size) * factor

    def follow(self, phases: Phases, done: Progress) -> Course:
        """Take factors and peaks of the phases of a run from `done` on; return its course."""
        self.course = phases.course(done)
        self.phases = phases.rates(done)
        self.peaks = phases.peaks(done)
        return self.course

    def change_length(self, before: int, steps: int) -> None:
        """A schedule as long as the run follows it to its new number of steps."""
        if self.course is not None and self.schedule.in_tokens:
            before = self.course.tokens_after(before)
            steps = self.course.tokens_after(steps)
        if self.schedule.total_steps == before:
            self.schedule = replace(self.schedule, total_steps=steps)

    def record(self) -> dict[str, Any]:
        """Return the numbers of a checkpoint, of which `with_record` makes the same rates."""
        record: dict[str, Any] = {**asdict(self.schedule), "peak": self.peak}
        if not self.schedule.in_tokens:
            # As in checkpoints of versions that knew steps alone.
            del record["in_tokens"]
        if self.phases:
            record["phases"] = [list(phase) for phase in self.phases]
        if self.peaks:
            record["peaks"] = [list(peak) for peak in self.peaks]
        return record

    def with_record(self, record: dict[str, Any]) -> LearningRate:
        own = {"in_tokens": False, **record}
        peak = own.pop("peak", self.peak)
        phases = _pairs(own.pop("phases", ()))
        peaks = _pairs(own.pop("peaks", ()))
        schedule = replace(self.schedule, **own)
        return replace(self, schedule=schedule, peak=peak, phases=phases, peaks=peaks)


def _latest(changes: tuple[tuple[int, float], ...], step: int, first: float) -> float:
    return next((value for begin, value in reversed(changes) if begin <= step), first)


def _pairs(found: Any) -> tuple[tuple[int, float], ...]:
    return tuple((int(step), float(value)) for step, value in found)
