"""The learning rate's schedule of a run: the length of each part, in steps or tokens."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from titanlite.config.decays import DECAYS
from titanlite.config.notes import Note, Weight
from titanlite.config.sections import Config
from titanlite.optim.schedule import Schedule
from titanlite.utils import counted

if TYPE_CHECKING:
    from titanlite.data.step_sizes import Course


def schedule_of(d: Config, steps: int | None, course: Course, notes: list[Note]) -> Schedule:
    """Return the schedule of `steps` steps; None: not known yet."""
    section = d.lr_scheduler
    warmup = d.training.warmup_steps
    length = run_length(section.unit, steps, course)
    total = length if section.total_steps is None else section.total_steps
    schedule = Schedule(
        total_steps=total,
        warmup_steps=0 if section.warmup_ratio is not None else warmup,
        decay_type=DECAYS[section.decay_type].formula or section.decay_type,
        decay_steps=section.decay_steps,
        min_lr_factor=section.min_lr_factor,
        min_lr=section.min_lr,
        style=section.style,
        in_tokens=section.unit == "tokens",
    )
    if total is None:
        return schedule
    if length not in (None, total):
        text = (
            f"the schedule is {total} {section.unit} long (lr_scheduler.total_steps), the run "
            f"{length}"
        )
        notes.append(Note(Weight.NUMBERS, text))

    def part(
        name: str, ratio: float | None, given: float | None, limit: float, is_whole: bool
    ) -> float | None:
        """Return a part's length, at most `limit`: `ratio` of the schedule, else `given`."""
        if ratio is not None:
            given = round(ratio * total) if is_whole else ratio * total
        if given is None or given <= limit:
            return given
        before = total - limit
        rest = f", {before:.10g} of them warm-up" if before > 0 else ""
        text = (
            f"the {name} of {counted(given, section.unit)} is shortened to {limit:.10g}: the "
            f"schedule has {total} {section.unit}{rest}"
        )
        notes.append(Note(Weight.NUMBERS, text, warns=True))
        return limit

    # The AWS samples take fractions of steps.
    is_whole = section.style != "fsdp"
    warmup_steps = part("warmup", section.warmup_ratio, warmup, total, is_whole) or 0
    rest = total - warmup_steps
    decay = part("decay", section.decay_ratio, section.decay_steps, rest, is_whole=True)
    plateau = part("plateau", section.plateau_ratio, None, rest, is_whole)
    return replace(
        schedule,
        warmup_steps=warmup_steps,
        decay_steps=None if decay is None else int(decay),
        plateau_steps=plateau,
    )


def run_length(unit: str, steps: int | None, course: Course) -> int | None:
    """Return the length of `steps` steps in a schedule's unit."""
    if steps is None or unit == "steps":
        return steps
    return course.tokens_after(steps)
