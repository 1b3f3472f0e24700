"""Batches over ranks: the same global order on any number of them, exact resume, agreed ends."""

from __future__ import annotations

import itertools

import pytest
import torch

from titanlite.config.plans import BatchPlan
from titanlite.data import Batch, EndOfData, PackedDataset, TrainLoader, ValidationLoader, add_hashes, batch_hash
from titanlite.data.corpus import Corpus
from titanlite.data.errors import DataError
from titanlite.data.packing import IGNORE

SEQ = 16


def batch_plan(global_batch: int, ranks: int, micro: int | None = None) -> BatchPlan:
    micro = micro or global_batch // ranks
    return BatchPlan(
        micro_batch_size=micro,
        accumulation=global_batch // ranks // micro,
        global_batch_size=global_batch,
        seq_len=SEQ,
        tokens_per_step=global_batch * SEQ,
    )


def loaders(dataset: PackedDataset, global_batch: int, ranks: int, micro: int | None = None) -> list[TrainLoader]:
    return [TrainLoader(dataset, batch_plan(global_batch, ranks, micro), rank, ranks) for rank in range(ranks)]


def rows(batches: list[Batch]) -> list[list[int]]:
    return [row for batch in batches for row in batch.tokens.tolist()]


def global_steps(dataset: PackedDataset, global_batch: int, ranks: int, steps: int, start: int = 0) -> list[list]:
    """What all ranks see, put back into the global order."""
    group = loaders(dataset, global_batch, ranks)
    for loader in group:
        loader.load_state_dict({"next_sequence": start})
    found = []
    for _ in range(steps):
        per_rank = [rows(loader.next_step()) for loader in group]
        found.append([row for together in zip(*per_rank, strict=True) for row in together])
    return found


@pytest.mark.parametrize(
    ("global_batch", "ranks", "micro"), [(12, 1, 4), (12, 2, 3), (12, 3, 4), (12, 4, 1), (12, 12, 1)]
)
def test_any_split_serves_the_sequences_of_a_step(corpus: Corpus, global_batch: int, ranks: int, micro: int) -> None:
    dataset = PackedDataset(corpus, seq_len=SEQ, seed=1)
    group = loaders(dataset, global_batch, ranks, micro)
    for step in range(8):  # 8 x 12 x 16 tokens: two and a half epochs
        expected = [dataset.sequence(i)[0].tolist() for i in range(step * global_batch, (step + 1) * global_batch)]
        for rank, loader in enumerate(group):
            batches = loader.next_step()
            assert [batch.tokens.shape for batch in batches] == [(micro, SEQ)] * (global_batch // ranks // micro)
            assert all(batch.tokens.dtype == batch.labels.dtype == torch.int64 for batch in batches)
            assert rows(batches) == expected[rank::ranks]


@pytest.mark.parametrize("ranks", [1, 2, 3, 6])
@pytest.mark.parametrize("epochs", [1, 3])
def test_every_token_is_a_target_once_per_epoch_over_all_ranks(corpus: Corpus, ranks: int, epochs: int) -> None:
    dataset = PackedDataset(corpus, seq_len=SEQ, seed=1, epochs=epochs)
    seen = torch.zeros(600, dtype=torch.int64)
    steps = set()
    for loader in loaders(dataset, 6, ranks):
        count = 0
        while True:
            try:
                batches = loader.next_step()
            except EndOfData:
                break
            count += 1
            for batch in batches:
                seen += torch.bincount(batch.labels[batch.labels != IGNORE], minlength=600)
        steps.add(count)
    first = int(dataset.sequence(0)[0][0])
    expected = torch.full((600,), epochs)
    expected[0] = 0
    expected[first] -= 1  # the very first token has nothing before it
    assert seen.tolist() == expected.tolist()
    assert len(steps) == 1, "ranks must agree on the end"


def test_ranks_read_different_data(corpus: Corpus) -> None:
    dataset = PackedDataset(corpus, seq_len=SEQ)
    per_rank = [rows(loader.next_step()) for loader in loaders(dataset, 8, 4)]
    for a, b in itertools.combinations(per_rank, 2):
        assert not {tuple(row) for row in a} & {tuple(row) for row in b}


@pytest.mark.parametrize("stop", [1, 5, 6, 7, 13])
def test_resume_equals_a_straight_run_across_two_epoch_ends(corpus: Corpus, stop: int) -> None:
    dataset = PackedDataset(corpus, seq_len=SEQ, seed=9)
    straight = global_steps(dataset, 6, 2, 20)  # 37.4 sequences an epoch: 6 steps
    (first,) = loaders(dataset, 6, 1)
    for _ in range(stop):
        first.next_step()
    state = first.state_dict()
    assert state == {"next_sequence": stop * 6} and first.position == stop * 6
    fresh = PackedDataset(corpus, seq_len=SEQ, seed=9)
    assert global_steps(fresh, 6, 2, 20 - stop, state["next_sequence"]) == straight[stop:]
    # And a second time, from the resumed run.
    assert global_steps(fresh, 6, 3, 2, 18 * 6) == straight[18:]


def test_another_number_of_ranks_sees_the_same_global_batches(corpus: Corpus) -> None:
    dataset = PackedDataset(corpus, seq_len=SEQ, seed=2)
    expected = global_steps(dataset, 12, 1, 9)
    for ranks in (2, 3, 4, 6, 12):
        assert global_steps(dataset, 12, ranks, 9) == expected


def test_a_position_that_the_ranks_do_not_divide(corpus: Corpus) -> None:
    """After a change of the global batch the position need not be a multiple of the ranks."""
    dataset = PackedDataset(corpus, seq_len=SEQ, seed=2)
    seen = []
    for loader in loaders(dataset, 8, 4):
        loader.load_state_dict({"next_sequence": 7})
        seen += rows(loader.next_step())
        assert loader.position == 15
    assert sorted(seen) == sorted(dataset.sequence(i)[0].tolist() for i in range(7, 15))


def test_finite_data_end_for_all_ranks_at_once(corpus: Corpus) -> None:
    dataset = PackedDataset(corpus, seq_len=SEQ, epochs=1)  # 38 sequences: four steps of 9, a last one of 2
    for loader in loaders(dataset, 9, 3):
        assert loader.steps_left == 5
        for _ in range(4):
            assert all((batch.labels != IGNORE).all() for batch in loader.next_step())
        (last,) = loader.next_step()
        assert last.tokens.shape == (3, SEQ)
        assert ((last.labels != IGNORE).any(dim=1)).tolist() == [loader.rank < 2, False, False]
        assert loader.steps_left == 0
        for _ in range(2):
            with pytest.raises(EndOfData, match=r"1 epoch of 599 tokens are served"):
                loader.next_step()


def test_rank_counts_that_do_not_fit_name_those_that_do(corpus: Corpus) -> None:
    dataset = PackedDataset(corpus, seq_len=SEQ)
    with pytest.raises(DataError, match="12 sequences .* by 5 data-parallel ranks.* divide it: 1, 2, 3, 4, 6, 12"):
        TrainLoader(dataset, batch_plan(12, 1), 0, 5)
    with pytest.raises(DataError, match="12 is not micro-batch 6 x accumulation 1 x 1"):
        TrainLoader(dataset, batch_plan(12, 2), 0, 1)
    with pytest.raises(DataError, match="rank 2 is not one of 2"):
        TrainLoader(dataset, batch_plan(12, 2), 2, 2)
    with pytest.raises(DataError, match="the batch expects 16, the data set has 8"):
        TrainLoader(PackedDataset(corpus, seq_len=8), batch_plan(12, 1))


@pytest.mark.parametrize("state", [{}, {"next_sequence": -1}, {"next_sequence": "7"}, {"next_sequence": None}])
def test_a_state_that_is_none_is_refused(corpus: Corpus, state: dict) -> None:
    with pytest.raises(DataError, match="next_sequence = "):
        TrainLoader(PackedDataset(corpus, seq_len=SEQ), batch_plan(4, 1)).load_state_dict(state)


def test_hashes_add_up_over_ranks_and_tell_data_apart(corpus: Corpus) -> None:
    dataset = PackedDataset(corpus, seq_len=SEQ)
    (whole,) = loaders(dataset, 12, 1)
    expected = [batch_hash(whole.next_step()) for _ in range(3)]
    assert len(set(expected)) == 3
    for ranks, micro in ((2, 6), (4, 1), (3, 2)):
        group = loaders(dataset, 12, ranks, micro)
        assert [add_hashes(batch_hash(loader.next_step()) for loader in group) for _ in range(3)] == expected
    (batch,) = loaders(dataset, 12, 1)[0].next_step()
    changed = batch.labels.clone()
    changed[3, 5] = IGNORE
    assert batch_hash([Batch(batch.tokens, changed)]) != batch_hash([batch])
    twice = Batch(batch.tokens[[0, 0]], batch.labels[[0, 0]])
    assert batch_hash([twice]) not in (batch_hash([]), batch_hash([Batch(batch.tokens[:1], batch.labels[:1])]))


@pytest.mark.parametrize("ranks", [1, 2, 3, 7])
def test_a_full_validation_pass_has_the_same_targets_on_any_number_of_ranks(corpus: Corpus, ranks: int) -> None:
    dataset = PackedDataset(corpus, seq_len=SEQ, shuffle=False, epochs=1)
    passes = []
    group = [ValidationLoader(dataset, 4, -1, rank, ranks) for rank in range(ranks)]
    assert len({len(loader) for loader in group}) == 1
    for _ in range(2):
        labels = []
        for loader in group:
            batches = list(loader)
            assert len(batches) == len(loader)
            assert all(batch.tokens.shape == (4, SEQ) for batch in batches)
            labels += [label for b in batches for label in b.labels.flatten().tolist() if label != IGNORE]
        passes.append(sorted(labels))
    assert passes[0] == passes[1] == list(range(2, 600))


def test_validation_steps_take_the_first_sequences(corpus: Corpus) -> None:
    dataset = PackedDataset(corpus, seq_len=SEQ, shuffle=False, epochs=1)
    seen = [row for rank in range(2) for batch in ValidationLoader(dataset, 4, 2, rank, 2) for row in rows([batch])]
    assert sorted(seen) == [dataset.sequence(i)[0].tolist() for i in range(16)]
    assert len(ValidationLoader(dataset, 4, 1000)) == len(ValidationLoader(dataset, 4)) == 10


def test_validation_refuses_what_it_cannot_measure(corpus: Corpus) -> None:
    finite = PackedDataset(corpus, seq_len=SEQ, epochs=1)
    with pytest.raises(DataError, match="epochs=1"):
        ValidationLoader(PackedDataset(corpus, seq_len=SEQ), 4)
    with pytest.raises(DataError, match="validation.steps: 0"):
        ValidationLoader(finite, 4, 0)
    with pytest.raises(DataError, match="validation.batch_size: 0"):
        ValidationLoader(finite, 0)
