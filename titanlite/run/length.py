"""The length of a run in steps."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from msgspec.structs import replace as replace_fields

from titanlite.config.notes import by_weight
from titanlite.run.schedule_parts import run_length, schedule_of

if TYPE_CHECKING:
    from titanlite.config.sections import Config
    from titanlite.data.step_sizes import Course
    from titanlite.run.config import RunConfig


def steps_of(d: Config, course: Course) -> int | None:
    """Return a run's steps; None: they follow from epochs when the text is counted."""
    if d.training.tokens is not None:
        return course.steps_with_tokens(d.training.tokens)
    return None if d.training.epochs is not None else d.training.steps


def with_length(run: RunConfig, total_sequences: int) -> RunConfig:
    """Return a run in epochs with its length, from all epochs' packed sequences."""
    from titanlite.data.skip_ranges import count, ranges_of_steps

    skipped = count(0, total_sequences, ranges_of_steps(run.data.skip_steps, run.course))
    steps = run.course.steps_with_rows(total_sequences - skipped)
    notes = [*run.notes]
    schedule = schedule_of(run, steps, run.course, notes)
    # A schedule with a length of its own has told before.
    return replace_fields(run, steps=steps, schedule=schedule, notes=by_weight(notes))


def with_steps(run: RunConfig, steps: int) -> RunConfig:
    """Return the run with other steps; a schedule as long as the run follows."""
    schedule = run.schedule
    if schedule.total_steps == run_length(schedule.unit, run.steps, run.course):
        length = run_length(schedule.unit, steps, run.course)
        schedule = replace(schedule, total_steps=length)
    return replace_fields(run, steps=steps, schedule=schedule)
