"""Stretches of the data order that are left out: the same for all ranks, exact over a resume."""

from __future__ import annotations

import random

import pytest

from tests.data.conftest import make_corpus
from tests.data.test_loader import SEQ, batch_plan, rows
from titanlite.data import EndOfData, PackedDataset, Prefetcher, TrainLoader
from titanlite.data.corpus import Corpus
from titanlite.data.left_out import before, count, merged, of_steps, take, without
from titanlite.data.loader import late


def test_arithmetic_of_stretches_agrees_with_sets_of_numbers() -> None:
    draw = random.Random(3)
    for _ in range(300):
        a, b = ([(x := draw.randrange(40), x + draw.randrange(9)) for _ in range(draw.randrange(5))] for _ in range(2))
        left, right = ({n for first, end in some for n in range(first, end)} for some in (a, b))
        apart = merged(a)
        assert {n for first, end in apart for n in range(first, end)} == left
        assert all(x[1] < y[0] for x, y in zip(apart, apart[1:], strict=False))
        assert {n for first, end in without(apart, merged(b)) for n in range(first, end)} == left - right
        place, number = draw.randrange(45), draw.randrange(1, 20)
        assert {n for first, end in before(place, apart) for n in range(first, end)} == {n for n in left if n < place}
        assert count(place, place + number, apart) == len(left & set(range(place, place + number)))
        assert take(place, number, apart) == [n for n in range(place, 200) if n not in left][:number]


def test_steps_are_those_of_an_undisturbed_run() -> None:
    assert of_steps([(3, 3), (5, 6), (4, 4)], 8) == ((16, 48),)
    assert of_steps([(1, 1), (9, 10)], 4) == ((0, 4), (32, 40))


def _all(dataset: PackedDataset, ranks: int, steps: int, left_out: list, states: list[dict] | None = None) -> list:
    """What all ranks see in each step, in the global order; from `states`, which are left at the end."""
    group = [TrainLoader(dataset, batch_plan(6, ranks), rank, ranks, left_out) for rank in range(ranks)]
    for loader, state in zip(group, states or [], strict=False):
        loader.load_state_dict(state)
    found = [[rows(loader.next_step()) for loader in group] for _ in range(steps)]
    if states is not None:
        states[:] = [loader.state_dict() for loader in group]
    return [sorted(row for part in step for row in part) for step in found]


def _rows(dataset: PackedDataset, numbers: list[int]) -> list:
    return sorted(dataset.sequence(n)[0].tolist() for n in numbers)


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_left_out_sequences_are_served_to_nobody(corpus: Corpus, ranks: int) -> None:
    dataset = PackedDataset(corpus, seq_len=SEQ, seed=2)
    found = _all(dataset, ranks, 4, [(6, 18), (26, 29)])
    wanted = [range(6), range(18, 24), [24, 25, 29, 30, 31, 32], range(33, 39)]
    assert found == [_rows(dataset, list(numbers)) for numbers in wanted]


def test_resume_goes_on_alike_on_any_number_of_ranks(corpus: Corpus) -> None:
    dataset = PackedDataset(corpus, seq_len=SEQ, seed=2)
    left_out = [(6, 18), (26, 29)]
    straight = _all(dataset, 2, 6, left_out)
    for stop in range(6):
        states: list[dict] = [{"next_sequence": 0}] * 2
        assert _all(dataset, 2, stop, left_out, states) == straight[:stop]
        assert states[0] == states[1]
        assert _all(dataset, 3, 6 - stop, left_out, [states[0]] * 3) == straight[stop:]
    assert states[0] == {"next_sequence": 45, "left_out": [[6, 18], [26, 29]]}


def test_the_state_says_what_was_left_out_and_what_came_too_late(corpus: Corpus) -> None:
    dataset = PackedDataset(corpus, seq_len=SEQ)
    loader = TrainLoader(dataset, batch_plan(6, 1), left_out=[(6, 12)])
    for _ in range(2):
        loader.next_step()
    state = loader.state_dict()
    assert state == {"next_sequence": 18, "left_out": [[6, 12]]}
    asked = [(0, 12), (15, 24)]
    assert late(asked, state) == ((0, 6), (15, 18))
    other = TrainLoader(dataset, batch_plan(6, 1), left_out=asked)
    other.load_state_dict(state)
    assert other.state_dict() == state, "what came too late was served"
    assert rows(other.next_step()) == [dataset.sequence(n)[0].tolist() for n in range(24, 30)]
    assert other.state_dict() == {"next_sequence": 30, "left_out": [[6, 12], [18, 24]]}


def test_a_thread_that_prepares_steps_passes_over_the_same(corpus: Corpus) -> None:
    dataset = PackedDataset(corpus, seq_len=SEQ)
    plain = TrainLoader(dataset, batch_plan(6, 1), left_out=[(6, 12)])
    with Prefetcher(TrainLoader(dataset, batch_plan(6, 1), left_out=[(6, 12)]), depth=2) as ahead:
        for _ in range(3):
            assert rows(ahead.next_step()) == rows(plain.next_step())
            assert ahead.state_dict() == plain.state_dict()


def test_finite_data_end_sooner(corpus: Corpus) -> None:
    dataset = PackedDataset(corpus, seq_len=SEQ, epochs=1)  # 38 sequences
    loader = TrainLoader(dataset, batch_plan(6, 1), left_out=[(6, 12), (30, 99)])
    assert loader.steps_left == 4
    for _ in range(4):
        loader.next_step()
    assert loader.steps_left == 0
    with pytest.raises(EndOfData):
        loader.next_step()


def test_documents_of_a_sequence_are_those_its_tokens_come_from() -> None:
    corpus = make_corpus([5, 30, 3, 9])
    plain = PackedDataset(corpus, seq_len=8, shuffle=False)
    assert [plain.documents_in(n) for n in range(6)] == [[0, 1], [1], [1], [1], [1, 2, 3], [3, 0]]
    mixed = PackedDataset(corpus, seq_len=8, seed=4)
    for n in range(12):
        tokens = mixed.sequence(n)[0]
        owners = {int(corpus.offsets[1:].searchsorted(token - 1, side="right")) for token in tokens}
        assert owners <= set(mixed.documents_in(n)) and len(mixed.documents_in(n)) <= len(owners) + 1
