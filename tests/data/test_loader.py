"""Batches over ranks: the same global order on any number of them, exact resume, skipped ranges,
agreed ends.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable

import pytest
import torch

from titanlite.data import DataError, EndOfData
from titanlite.data.batch_hash import add_hashes, batch_hash, step_hash
from titanlite.data.loader import Batch, TrainLoader
from titanlite.data.rows import IGNORE
from titanlite.data.sequences import PackedDataset
from titanlite.data.skip_ranges import before, count, merged, served_already, take, without
from titanlite.data.validation_loader import ValidationLoader

SEQ = 16
SKIP = [(6, 18), (26, 29)]


def loaders(
    dataset: PackedDataset, global_batch: int, ranks: int, micro: int = 0, skip: list = ()
) -> list[TrainLoader]:  # type: ignore[assignment]
    micro = micro or global_batch // ranks
    return [TrainLoader(dataset, global_batch, micro, rank, ranks, skip) for rank in range(ranks)]


def rows(batches: list[Batch]) -> list[list[int]]:
    return [row for batch in batches for row in batch.tokens.tolist()]


def steps_of(
    dataset: PackedDataset,
    ranks: int,
    steps: int,
    state: dict | None = None,
    skip: list = (),  # type: ignore[assignment]
) -> tuple[list[list], dict]:
    """The rows of all ranks by step of 6 sequences, and the state after them."""
    group = loaders(dataset, 6, ranks, skip=skip)
    for loader in group:
        loader.load_state_dict(state or {"next_sequence": 0})
    found = [sorted(sum((rows(one.next_step()) for one in group), [])) for _ in range(steps)]
    assert all(loader.state_dict() == group[0].state_dict() for loader in group)
    return found, group[0].state_dict()


@pytest.mark.parametrize(("ranks", "micro"), [(1, 4), (2, 3), (12, 1)])
def test_any_split_serves_the_sequences_of_a_step(corpus, ranks, micro):
    dataset = PackedDataset(corpus, seq_len=SEQ, seed=1)
    group = loaders(dataset, 12, ranks, micro)
    for step in range(8):  # 8 x 12 x 16 tokens: two and a half epochs
        expected = [dataset.sequence(i)[0].tolist() for i in range(step * 12, (step + 1) * 12)]
        for rank, loader in enumerate(group):
            batches = loader.next_step()
            assert [batch.tokens.shape for batch in batches] == [(micro, SEQ)] * (
                12 // ranks // micro
            )
            assert rows(batches) == expected[rank::ranks]


@pytest.mark.parametrize("skip", [[], SKIP])
@pytest.mark.parametrize("stop", [0, 6, 13])
def test_resume_on_another_number_of_ranks_equals_a_straight_run(corpus, stop, skip):
    dataset = PackedDataset(corpus, seq_len=SEQ, seed=9)  # 37.4 sequences an epoch: 6 steps
    straight, _ = steps_of(dataset, 2, 20, skip=skip)
    first, state = steps_of(dataset, 1, stop, skip=skip)
    if not skip:
        assert state == {"next_sequence": stop * 6}
    rest, _ = steps_of(PackedDataset(corpus, seq_len=SEQ, seed=9), 3, 20 - stop, state, skip)
    assert first + rest == straight


@pytest.mark.parametrize(("skip", "steps", "sequences"), [([], 5, 2), ([(6, 12), (30, 99)], 3, 6)])
def test_finite_data_end_for_all_ranks_at_once(corpus, skip, steps, sequences):
    dataset = PackedDataset(corpus, seq_len=SEQ, epochs=1)  # 38 sequences in steps of 9
    targets = 0
    for loader in loaders(dataset, 9, 3, skip=skip):
        assert loader.steps_left == steps
        for _ in range(steps - 1):
            assert all((batch.labels != IGNORE).all() for batch in loader.next_step())
        (last,) = loader.next_step()
        targets += int((last.labels != IGNORE).any(dim=1).sum())
        assert loader.steps_left == 0
        with pytest.raises(EndOfData, match="the data end: 38 sequences"):
            loader.next_step()
    assert targets == sequences


def test_sizes_and_states_that_do_not_fit_are_refused(corpus):
    dataset = PackedDataset(corpus, seq_len=SEQ)
    with pytest.raises(DataError, match="training.global_batch_size: 12 .* micro-batch 2 x 5"):
        TrainLoader(dataset, 12, 2, 0, 5)
    with pytest.raises(DataError, match="next_sequence"):
        TrainLoader(dataset, 4, 4).load_state_dict({"next_sequence": -1})


# Skipped ranges


def numbers(ranges: Iterable[tuple[int, int]]) -> set[int]:
    return {n for first, end in ranges for n in range(first, end)}


def test_arithmetic_of_ranges_agrees_with_sets_of_numbers():
    draw = random.Random(3)
    for _ in range(300):
        a, b = ([(x := draw.randrange(40), x + draw.randrange(9)) for _ in "123"] for _ in "ab")
        place = draw.randrange(45)
        end = place + draw.randrange(1, 20)
        apart = merged(a)
        left = numbers(a)
        assert numbers(apart) == left
        assert all(x[1] < y[0] for x, y in itertools.pairwise(apart))
        assert numbers(without(apart, merged(b))) == left - numbers(b)
        assert numbers(before(place, apart)) == {n for n in left if n < place}
        assert count(place, end, apart) == len(left & set(range(place, end)))
        wanted = [n for n in range(place, 200) if n not in left]
        assert take(place, end - place, apart) == wanted[: end - place]


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_skipped_sequences_are_served_to_nobody(corpus, ranks):
    """After a range, or a change of the global batch, the position need not be a multiple of the
    ranks.
    """
    dataset = PackedDataset(corpus, seq_len=SEQ, seed=2)
    wanted = [range(6), range(18, 24), [24, 25, 29, 30, 31, 32], range(33, 39)]
    found, state = steps_of(dataset, ranks, 4, skip=SKIP)
    assert found == [sorted(dataset.sequence(n)[0].tolist() for n in numbers) for numbers in wanted]
    assert state == {"next_sequence": 39, "left_out": [[6, 18], [26, 29]]}


def test_the_state_holds_the_skipped_ranges_and_not_those_that_came_too_late(corpus):
    dataset = PackedDataset(corpus, seq_len=SEQ)
    state = {"next_sequence": 18, "left_out": [[6, 12]]}
    asked = [(0, 12), (15, 24)]
    assert served_already(asked, state) == ((0, 6), (15, 18))
    loader = TrainLoader(dataset, 6, 6, skip=asked)
    loader.load_state_dict(state)
    assert loader.state_dict() == state, "ranges that came too late were served"
    assert rows(loader.next_step()) == [dataset.sequence(n)[0].tolist() for n in range(24, 30)]
    assert loader.state_dict() == {"next_sequence": 30, "left_out": [[6, 12], [18, 24]]}


# Hashes


def test_hashes_add_up_over_ranks_and_tell_data_apart(corpus):
    dataset = PackedDataset(corpus, seq_len=SEQ, epochs=1)
    whole = [step_hash(dataset, step * 12, 12) for step in range(3)]
    assert len(set(whole)) == 3
    for ranks, micro in ((1, 12), (4, 1), (3, 2)):
        group = loaders(dataset, 12, ranks, micro)
        for wanted in whole:
            assert add_hashes(batch_hash(loader.next_step()) for loader in group) == wanted
    parts = [step_hash(dataset, 12, 12, part, 5) for part in range(5)]
    assert add_hashes(part for part in parts if part) == whole[1]
    assert step_hash(dataset, 38, 12) is None
    (batch,) = loaders(dataset, 12, 1)[0].next_step()
    changed = batch.labels.clone()
    changed[3, 5] = IGNORE
    assert batch_hash([Batch(batch.tokens, changed)]) != whole[0]


# Validation


@pytest.mark.parametrize("ranks", [2, 7])
def test_a_full_validation_pass_has_the_same_targets_on_any_number_of_ranks(corpus, ranks):
    dataset = PackedDataset(corpus, seq_len=SEQ, shuffle=False, epochs=1)
    group = [ValidationLoader(dataset, 4, -1, rank, ranks) for rank in range(ranks)]
    assert len({len(loader) for loader in group}) == 1
    for _ in range(2):
        batches = [batch for loader in group for batch in loader]
        assert len(batches) == ranks * len(group[0])
        labels = torch.cat([batch.labels.flatten() for batch in batches])
        assert sorted(labels[labels != IGNORE].tolist()) == list(range(2, 600))


def test_validation_steps_take_the_first_sequences(corpus):
    dataset = PackedDataset(corpus, seq_len=SEQ, shuffle=False, epochs=1)
    endless = PackedDataset(corpus, seq_len=SEQ)
    seen = sum((rows([*ValidationLoader(dataset, 4, 2, rank, 2)]) for rank in range(2)), [])
    assert sorted(seen) == [dataset.sequence(i)[0].tolist() for i in range(16)]
    assert len(ValidationLoader(dataset, 4, 1000)) == 10
    assert len(list(ValidationLoader(endless, 4, 30))) == 30
    with pytest.raises(DataError, match="needs a text with an end"):
        ValidationLoader(endless, 4)
