"""The sizes of steps in phases: step by step, against a walk that knows no legs."""

from __future__ import annotations

import json
import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.support.sources import Numbers
from titanlite.checkpoint.resume import load_text
from titanlite.config.data_sections import DataPhase
from titanlite.data import DataError
from titanlite.data.loader import Fetched, TrainLoader
from titanlite.data.phases import Phases
from titanlite.data.rows import Row
from titanlite.data.skip_ranges import Range, ranges_of_steps, skip_to, take
from titanlite.data.step_sizes import FRESH, Progress
from titanlite.metrics.bad_step_log import steps_text
from titanlite.optim.schedule import LearningRate, Schedule

SEQ_LEN = 10


def phases_of(*phases: DataPhase, skip: tuple[Range, ...] = ()) -> Phases:
    return Phases(phases, {}, 4, 4 * SEQ_LEN, skip)


def walk(phases: Phases, steps: int) -> list[Progress]:
    """Return the progress after each step, one after the other."""
    size = phases.global_batch
    waiting = list(phases.phases)
    found = [FRESH]
    for step in range(1, steps + 1):
        here = found[-1]
        for phase in list(waiting):
            if phase.step == step or (phase.tokens is not None and here.tokens >= phase.tokens):
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
            begin = {"step": rng.randint(2, 30)}
        else:
            begin = {"tokens": rng.randint(1, 1500)}
        found.append(DataPhase(**begin, global_batch_size=batch, weights={"a": 1.0}, lr_factor=0.5))
    # The last one in the file holds of phases that begin together: the walk goes by the file.
    firsts = [begin.step for begin in phases_of(*found)._begins(FRESH)]
    if len(set(firsts)) < len(firsts):
        return random_phases(seed + 1000)
    skip = ((17, 29), (80, 83)) if seed % 2 else ()
    return phases_of(*found, skip=skip)


@pytest.mark.parametrize("seed", range(20))
def test_every_step_has_the_size_and_place_of_a_walk(seed):
    phases = random_phases(seed)
    wanted = walk(phases, 40)
    course = phases.course()
    for before, after in zip(wanted, wanted[1:], strict=False):
        assert course.tokens_after(after.steps) == after.tokens
        size = course.size(after.steps)
        assert size.tokens == after.tokens - before.tokens
        assert course.size_at(before.position) == size
        # The run continues from here. Weights and rates of a phase begin together.
        ahead = phases.course(before)
        rates = [step for step, _ in phases.rates(before)]
        later = [wanted[step - 1].position for step in rates if before.steps < step <= 40]
        firsts = [first for first in phases.shares(before) if 0 < first <= wanted[39].position]
        assert sorted(firsts) == sorted(one for one in later if one)
        assert ahead.size(after.steps) == size
        assert ahead.size(40) == course.size(40)
        assert ahead.tokens_after(40) == wanted[40].tokens
        saved = {"tokens_seen": after.tokens, "global_batch": size.sequences}
        assert phases.expected_batch(after.steps, saved) == size.sequences
        assert phases.expected_batch(after.steps, {**saved, "global_batch": 20}) != 20


@pytest.mark.parametrize("seed", range(0, 12, 2))
def test_lengths_by_tokens_and_by_sequences_are_the_fewest_steps(seed):
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


def test_steps_of_the_data_order_follow_the_ramp_both_ways():
    """Steps of 4, 4, 8, 8, … sequences."""
    course = phases_of(DataPhase(step=3, global_batch_size=8)).course()
    assert ranges_of_steps([1, "2-4"], course) == ((0, 24),)
    assert ranges_of_steps(["3-4"], course) == ((8, 24),)
    assert ranges_of_steps([4], course) == ((16, 24),)
    assert steps_text(8, 24, course) == "3-4"
    assert steps_text(7, 9, course) == "2-3"


class Served(Numbers):
    """Rows that remember their numbers."""

    def __init__(self) -> None:
        super().__init__(None, 1)
        self.order: list[int] = []

    def sequence(self, index: int) -> Row:
        self.order.append(index)
        return super().sequence(index)


def run_of(phases: Phases, rows: Served) -> Any:
    """A run without a model: what `load_text` sees of it."""
    loader = TrainLoader(rows, 4, 4, skip=phases.skip)
    loader.follow(phases.course())
    schedule = Schedule(1000, 0, "constant", "titan", 1.0)
    parts = SimpleNamespace(
        phases=phases,
        learning_rate=LearningRate(schedule, 1.0),
        course=phases.course(),
        loader=loader,
        datasets=SimpleNamespace(train=rows),
    )
    return SimpleNamespace(parts=parts, step=0, tokens_seen=0)


def go(run: Any, until: int) -> dict[str, Any]:
    while run.step < until:
        run.step += 1
        run.parts.loader.next_step()
        run.tokens_seen += run.parts.course.size(run.step).tokens
    state: dict[str, Any] = json.loads(json.dumps(run.parts.loader.state_dict()))
    return state


@pytest.mark.parametrize(
    ("border", "bad"),
    [(DataPhase(step=7, global_batch_size=8), 6), (None, 5), (None, 7), (None, 8)],
)
def test_a_rollback_leaves_out_the_bad_text_and_keeps_the_border(border, bad):
    # 6 steps of 4 rows of 2 tokens come before it.
    phase = border or DataPhase(tokens=6 * 4 * 2, global_batch_size=8)
    phases = Phases([phase], {}, 4, 8)
    rows = Served()
    run = run_of(phases, rows)
    saved = go(run, 4)
    before = go(run, bad - 1)
    fetched = Fetched([], before, go(run, bad))
    rows.order.clear()
    run.step = 4
    run.tokens_seen = 4 * 8
    load_text(run, skip_to(saved, fetched.after))
    go(run, 10)
    # Steps 5 and 6 have 4 rows, later ones 8, and nothing is read twice.
    assert run.tokens_seen == (6 * 4 + 4 * 8) * 2
    first = fetched.after["next_sequence"]
    assert rows.order == list(range(first, first + 2 * 4 + 4 * 8))


@pytest.mark.parametrize(
    ("begin", "step", "first"), [({"step": 21}, 21, 120), ({"tokens": 320}, 31, 160)]
)
def test_weights_and_rate_change_together_after_a_resume_with_another_batch(begin, step, first):
    """10 steps of 8 sequences of 2 tokens, then steps of 4."""
    phase = DataPhase(**begin, weights={"b": 1.0}, lr_factor=0.5)
    before = Phases([phase], {"a": 1.0}, 8, 16)
    assert before.rates() == ((21, 0.5),)
    assert before.shares() == {0: {"a": 1.0}, 160: {"b": 1.0}}
    after = Phases([phase], {"a": 1.0}, 4, 8)
    for done in (Progress(10, 160, 80), Progress(15, 200, 100)):
        assert after.rates(done) == ((step, 0.5),)
        assert after.shares(done) == {0: {"a": 1.0}, first: {"b": 1.0}}


def test_steps_left_count_the_ramp():
    phases = Phases([DataPhase(step=4, global_batch_size=8)], {}, 4, 8, skip=((6, 9), (30, 33)))
    rows = Numbers(61, 1)
    loader = TrainLoader(rows, 4, 4, skip=phases.skip)
    loader.follow(phases.course())
    # 55 rows are served: 3 steps of 4, and 43 in steps of 8.
    for left in (9, 8, 7, 6, 5, 4, 3, 2, 1):
        assert loader.steps_left == left
        loader.next_step()
    assert loader.steps_left == 0


@pytest.mark.parametrize("ranks", [1, 2])
def test_shorter_sequences_are_the_pieces_of_rows_in_order(ranks):
    phases = Phases([DataPhase(step=3, seq_len=2, global_batch_size=4)], {}, 8, 8)
    assert phases.row_len == 2
    loaders = [TrainLoader(Served(), 8, 2, rank, ranks) for rank in range(ranks)]
    for loader in loaders:
        loader.follow(phases.course())
    for step in range(4):
        batches = [loader.next_step() for loader in loaders]
        wanted = [(2, 1)] * (4 // ranks) if step < 2 else [(2, 2)] * (2 // ranks)
        assert all([tuple(one.tokens.shape) for one in batch] == wanted for batch in batches)
        served = torch.cat([one.tokens.flatten() for batch in batches for one in batch])
        # Each row holds its number twice.
        assert sorted(served.tolist()) == sorted(2 * list(range(4 * step, 4 * step + 4)))
    with pytest.raises(DataError, match="a step of 8 tokens is not a multiple of 2 tokens x 8"):
        TrainLoader(Served(), 8, 1, 0, 8).follow(phases.course())
