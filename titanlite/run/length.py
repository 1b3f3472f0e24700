"""The length of a run in steps."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from msgspec.structs import replace as replace_fields

from titanlite.run.schedule_parts import Told, run_length, schedule_of
from titanlite.utils import counted

if TYPE_CHECKING:
    from titanlite.config.sections import Config
    from titanlite.data.step_sizes import Course
    from titanlite.run.config import RunConfig


def steps_of(d: Config, course: Course, notes: list[str]) -> int | None:
    """Return a run's steps, and note how they follow from tokens; None: from epochs later."""
    tokens = d.training.tokens
    if tokens is not None:
        steps = course.steps_with_tokens(tokens)
        per_step = _per_step(course, "tokens")
        notes.append(f"steps = {steps}: training.tokens {tokens:,} / {per_step}, rounded up")
        return steps
    if d.training.epochs is not None:
        notes.append(_not_yet(d.training.epochs))
        return None
    return d.training.steps


def _not_yet(epochs: int) -> str:
    return f"steps follow from {counted(epochs, 'epochs')} once the text is counted"


def _per_step(course: Course, unit: str) -> str:
    """Return a step's tokens or rows in each leg, in words."""
    sizes = [leg.size.tokens if unit == "tokens" else leg.size.rows for leg in course.legs]
    earlier = "".join(f"{size:,}, then " for size in sizes[:-1])
    return f"{earlier}{counted(sizes[-1], unit)} per step"


def with_length(run: RunConfig, total_sequences: int) -> RunConfig:
    """Return a run in epochs with its length, from all epochs' packed sequences."""
    from titanlite.data.skip_ranges import count, ranges_of_steps

    told = Told([], [])
    skipped = count(0, total_sequences, ranges_of_steps(run.data.skip_steps, run.course))
    steps = run.course.steps_with_rows(total_sequences - skipped)
    less = f" less {skipped} skipped (data.skip_steps)" if skipped else ""
    # With sequences of several lengths, rows are as long as the longest.
    one_length = all(size.rows == size.sequences for _, size in run.course.legs)
    unit = "sequences" if one_length else "rows"
    epochs = run.training.epochs or 0
    read = f"{counted(total_sequences, unit)} in {counted(epochs, 'epochs')}{less}"
    told.notes.append(f"steps = {steps}: {read} / {_per_step(run.course, unit)}, rounded up")
    schedule = schedule_of(run, steps, run.course, told)
    earlier = [note for note in run.notes if note != _not_yet(epochs)]
    return replace_fields(
        run,
        steps=steps,
        schedule=schedule,
        # A schedule with a length of its own has told before.
        notes=tuple(dict.fromkeys([*earlier, *told.notes])),
        warnings=tuple(dict.fromkeys([*run.warnings, *told.warnings])),
    )


def with_steps(run: RunConfig, steps: int) -> RunConfig:
    """Return the run with other steps; a schedule as long as the run follows."""
    schedule = run.schedule
    if schedule.total_steps == run_length(schedule.unit, run.steps, run.course):
        length = run_length(schedule.unit, steps, run.course)
        schedule = replace(schedule, total_steps=length)
    return replace_fields(run, steps=steps, schedule=schedule)
