"""The sizes of steps in phases: step by step, against a walk that knows no legs."""

from __future__ import annotations

import random

import pytest

from titanlite.config.data_sections import DataPhase
from titanlite.data.course import FRESH, Course, Progress, StepSize
from titanlite.data.phases import Phases
from titanlite.data.skip_ranges import Range, ranges_of_steps, take
from titanlite.training.anomalies import Fetched, steps_text

SEQ_LEN = 10


def phases_of(*phases: DataPhase, size: int = 4, skip: tuple[Range, ...] = ()) -> Phases:
    return Phases(phases, {}, size, size * SEQ_LEN, skip)


def walk(phases: Phases, steps: int, done: Progress = FRESH, held: int = 0) -> list[Progress]:
    """Return the progress after each step, one after the other. held: sequences of a step before
    the first one; 0: those before any phase.
    """
    size = held or phases.global_batch
    waiting = list(phases.phases)
    found = [done]
    while found[-1].steps < steps:
        here = found[-1]
        step = here.steps + 1
        for phase in list(waiting):
            begins = phase.step == step
            if phase.tokens is not None:
                begins = here.tokens >= phase.tokens
            if begins:
                waiting.remove(phase)
                size = phase.global_batch_size or size
        taken = take(here.position, size, phases.skip)
        found.append(Progress(step, here.tokens + size * SEQ_LEN, taken[-1] + 1))
    return found


def random_phases(seed: int) -> Phases:
    rng = random.Random(seed)
    found = []
    for _ in range(rng.randint(0, 4)):
        batch = rng.choice([None, 4, 8, 12])
        if rng.random() < 0.5:
            found.append(DataPhase(step=rng.randint(2, 30), global_batch_size=batch))
        else:
            found.append(DataPhase(tokens=rng.randint(1, 1500), global_batch_size=batch))
    # Of phases that begin together the last one in the file holds: the walk goes by the file.
    firsts = [begin.step for begin in phases_of(*found)._begins(FRESH)]
    if len(set(firsts)) < len(firsts):
        return random_phases(seed + 1000)
    skip = ((17, 29), (80, 83)) if seed % 2 else ()
    return phases_of(*found, skip=skip)


@pytest.mark.parametrize("seed", range(40))
def test_every_step_has_the_size_and_place_of_a_walk(seed: int) -> None:
    phases = random_phases(seed)
    wanted = walk(phases, 40)
    course = phases.course()
    for before, after in zip(wanted, wanted[1:], strict=False):
        assert course.tokens_after(after.steps) == after.tokens
        size = course.size(after.steps)
        assert size.tokens == after.tokens - before.tokens
        assert course.rows_at(before.position) == size.sequences
        # Where a run goes on from here.
        ahead = phases.course(before)
        assert ahead.size(after.steps) == size
        assert ahead.size(40) == course.size(40)
        assert ahead.tokens_after(40) == wanted[40].tokens
        saved = {"tokens_seen": after.tokens, "global_batch": size.sequences}
        assert phases.expected_batch(after.steps, saved) == size.sequences
        assert phases.expected_batch(after.steps, {**saved, "global_batch": 20}) != 20


@pytest.mark.parametrize("seed", range(0, 40, 2))
def test_lengths_by_tokens_and_by_sequences_are_the_fewest_steps(seed: int) -> None:
    phases = random_phases(seed)
    wanted = walk(phases, 60)
    course = phases.course()
    for number in range(1, wanted[40].tokens, 37):
        steps = course.steps_with_tokens(number)
        assert wanted[steps - 1].tokens < number <= wanted[steps].tokens
    for number in range(1, wanted[40].position, 3):
        steps = course.steps_with_rows(number)
        assert wanted[steps - 1].position < number <= wanted[steps].position
        assert course.position_after(steps) == wanted[steps].position


def test_steps_of_the_data_order_follow_the_ramp_both_ways() -> None:
    """Steps of 4, 4, 8, 8, … sequences."""
    course = phases_of(DataPhase(step=3, global_batch_size=8)).course()
    assert ranges_of_steps([1, "2-4"], course) == ((0, 24),)
    assert ranges_of_steps([2], course) == ((4, 8),)
    assert ranges_of_steps(["3-4"], course) == ((8, 24),)
    assert steps_text(4, 8, course) == "2"
    assert steps_text(8, 24, course) == "3-4"
    assert steps_text(7, 9, course) == "2-3"


def test_the_sequences_of_a_step_are_those_between_two_states() -> None:
    after = {"next_sequence": 20, "left_out": [[6, 9], [12, 15]]}
    fetched = Fetched([], {"next_sequence": 8}, after)
    assert fetched.sequences == [9, 10, 11, 15, 16, 17, 18, 19]


def test_a_steady_course_has_one_leg() -> None:
    course = Course.steady(StepSize(4, SEQ_LEN, 4))
    assert phases_of(DataPhase(step=7, lr_factor=0.5)).course() == course
    assert (course.tokens_after(0), course.tokens_after(3)) == (0, 120)
