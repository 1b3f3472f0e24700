"""The learning rate's schedule of a run: the length of each part, in steps."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from titanlite.config.sections import Config
from titanlite.optim.schedule import Schedule
from titanlite.utils import counted

if TYPE_CHECKING:
    from titanlite.start.derive import Told


def schedule_of(d: Config, steps: int | None, told: Told) -> Schedule:
    """Return the schedule of a run of `steps` steps; None: their number is not known yet."""
    section = d.lr_scheduler
    warmup = d.training.warmup_steps
    total = steps if section.total_steps is None else section.total_steps
    schedule = Schedule(
        total_steps=total,
        warmup_steps=0 if section.warmup_ratio is not None else warmup,
        decay_type="linear" if section.decay_type == "plateau" else section.decay_type,
        decay_steps=section.decay_steps,
        min_lr_factor=section.min_lr_factor,
        min_lr=section.min_lr,
        style=section.style,
    )
    if total is None:
        return schedule
    if steps not in (None, total):
        told.notes.append(
            f"the schedule is {total} steps long (lr_scheduler.total_steps), the run {steps}"
        )
    lengths = _Lengths(total, told)
    # The AWS samples take fractions of steps.
    whole = section.style != "fsdp"
    warmup_steps = lengths.of("warmup", section.warmup_ratio, warmup, total, whole) or 0
    rest = total - warmup_steps
    decay = lengths.of("decay", section.decay_ratio, section.decay_steps, rest, whole=True)
    plateau = lengths.of("plateau", section.plateau_ratio, None, rest, whole)
    return replace(
        schedule,
        warmup_steps=warmup_steps,
        decay_steps=None if decay is None else int(decay),
        plateau_steps=plateau,
    )


@dataclass
class _Lengths:
    """The parts of a schedule of `total` steps."""

    total: int
    told: Told

    def of(
        self, name: str, ratio: float | None, given: float | None, limit: float, whole: bool
    ) -> float | None:
        """Return the steps of one part, shortened to `limit`.

        ratio: of the schedule; None: `given` has the steps. whole: no fractions of steps.
        """
        if ratio is not None:
            given = ratio * self.total
            if whole:
                given = round(given)
            self.told.notes.append(
                f"{name} = {counted(given, 'steps')}: {name}_ratio {ratio} * {self.total} steps"
            )
        if given is None or given <= limit:
            return given
        warmup = self.total - limit
        rest = f", {warmup:.10g} of them warm-up" if warmup > 0 else ""
        self.told.warnings.append(
            f"the {name} of {counted(given, 'steps')} is shortened to {limit:.10g}: the schedule "
            f"has {self.total} steps{rest}"
        )
        return limit
