"""Streams: the order does not depend on ranks, each document is served once per epoch, and a resume
is exact.
"""

from __future__ import annotations

import gzip
import json
from collections import Counter

import numpy as np
import pytest

from tests.support.shards import first_rows, make_stream, write_shards
from titanlite.data import DataError
from titanlite.data.loader import TrainLoader
from titanlite.data.rows import IGNORE
from titanlite.data.stream import default_lanes
from titanlite.data.text_files import TextFiles


@pytest.mark.parametrize(
    ("sizes", "lanes", "shuffle"),
    [([13, 20, 7, 16, 9, 18, 11], 4, True), ([40, 33], 5, True), ([50], 1, False)],
)
def test_each_lane_serves_each_of_its_documents_once_per_epoch(tmp_path, sizes, lanes, shuffle):
    rows = make_stream(write_shards(tmp_path, sizes), lanes=lanes, shuffle=shuffle)
    seen: Counter[int] = Counter()
    for lane in range(lanes):
        found = [rows.sequence(lane + lanes * count) for count in range(3 * sum(sizes) // lanes)]
        tokens = np.concatenate([row.tokens for row in found])
        assert (np.concatenate([row.labels for row in found])[:-1] == tokens[1:]).all()
        # Documents by their BOS; the token after it has the number.
        epochs = Counter(tokens[1:][tokens[:-1] == 1].tolist())
        most = max(epochs.values())
        assert min(epochs.values()) >= most - 1 >= 1  # an epoch ends before the next begins
        seen.update(dict.fromkeys(epochs, 1))
    assert seen == Counter({number + 10: 1 for number in range(sum(sizes))})


#: Sequences of a step, and steps of a run.
SIZE = 24
STEPS = 8


def steps_of(names: list[str]) -> list[list[list[int]]]:
    """The sequences of each step, sorted."""
    rows = first_rows(make_stream(names), SIZE * STEPS)
    return [sorted(rows[n * SIZE : (n + 1) * SIZE]) for n in range(STEPS)]


def next_steps(loaders: list[TrainLoader]) -> list[list[int]]:
    return sorted(
        row for one in loaders for batch in one.next_step() for row in batch.tokens.tolist()
    )


@pytest.mark.parametrize("workers", [0, 2])
def test_every_number_of_ranks_serves_the_same_steps(names, workers):
    wanted = steps_of(names)[:4]
    for degree in (1, 2, 3, 4, 8):
        loaders = [
            TrainLoader(make_stream(names, workers=workers), SIZE, 1, rank, degree)
            for rank in range(degree)
        ]
        assert [next_steps(loaders) for _ in wanted] == wanted
        if 4 % degree == 0:  # then a rank opens only lanes of its own
            assert {len(loader.dataset.state_dict()["cursors"]) for loader in loaders} == {
                4 // degree
            }


@pytest.mark.parametrize(("before", "after"), [(2, 3), (3, 2), (1, 8)])
def test_a_resume_at_every_step_and_on_other_ranks_is_exact(names, before, after):
    wanted = steps_of(names)
    loaders = [TrainLoader(make_stream(names), SIZE, 1, rank, before) for rank in range(before)]
    for stop in range(STEPS):
        states = json.loads(json.dumps([loader.state_dict() for loader in loaders]))
        state = {
            **states[0],
            "rows": loaders[0].dataset.merge_states([state["rows"] for state in states]),
        }
        assert len(state["rows"]["cursors"]) == (
            4 if stop else 0
        )  # each lane has a place, whichever rank read it
        resumed = [
            TrainLoader(make_stream(names, lanes=None), SIZE, 1, rank, after)
            for rank in range(after)
        ]
        for loader in resumed:
            loader.load_state_dict(state)
        assert [next_steps(resumed) for _ in wanted[stop : stop + 2]] == wanted[stop : stop + 2]
        assert next_steps(loaders) == wanted[stop]


def test_going_back_gives_the_same_rows(names):
    rows = make_stream(names)
    wanted = first_rows(rows, 80)
    rows.close()
    assert first_rows(rows, 80) == wanted
    assert rows.sequence(3).tokens.tolist() == wanted[3]
    rows.load_state_dict({})
    assert first_rows(rows, 9) == wanted[:9]


def test_a_resume_reads_no_shard_that_is_done(names, monkeypatch):
    rows = make_stream(names, lanes=1)
    first_rows(rows, 45)
    state = rows.state_dict()
    opened: list[int] = []
    records = TextFiles.records
    monkeypatch.setattr(
        TextFiles, "records", lambda self, *place: opened.append(place[1]) or records(self, *place)
    )
    resumed = make_stream(names, lanes=1)
    resumed.load_state_dict(state)
    resumed.sequence(45)
    assert state["cursors"][0][3] > 0
    assert state["cursors"][0][4] in opened


def test_a_state_that_counts_fitted_rows_begins_its_block_again(names):
    rows = make_stream(names, lanes=1)
    first_rows(rows, 45)
    ((lane, count, *place),) = rows.state_dict()["cursors"]
    resumed = make_stream(names, lanes=1)
    resumed.load_state_dict(
        {**rows.state_dict(), "packing": "best-fit", "cursors": [[lane, count, *place[:3], 7, 0]]}
    )
    assert resumed.state_dict()["cursors"] == [[lane, count, *place[:3], 0, 0]]


def test_masked_documents_have_numbers_and_no_target_across_borders(names):
    row = make_stream(names, mask_documents=True).sequence(0)
    assert row.documents is not None
    assert set(np.diff(row.documents)) == {0, 1}
    borders = np.flatnonzero(np.diff(row.documents))
    assert all(row.labels[borders] == IGNORE)
    assert all(row.tokens[borders] == 2)


def test_the_number_of_lanes_is_that_of_the_checkpoint_unless_it_is_given(names):
    state = make_stream(names, lanes=4).state_dict()
    other = make_stream(names, lanes=None, ranks=6)
    other.load_state_dict(state)
    assert other.lanes == 4
    assert [default_lanes(6, 7), default_lanes(1, 1000), default_lanes(16, 8)] == [6, 8, 16]
    with pytest.raises(DataError, match="has 4 lanes, not 5"):
        make_stream(names, lanes=5).load_state_dict(state)


def test_bad_text_is_named_and_a_lane_without_text_too(tmp_path):
    names = write_shards(tmp_path, [3, 0])
    with pytest.raises(DataError, match="part-01.*a lane of the stream is empty"):
        first_rows(make_stream(names, lanes=2), 4)
    (tmp_path / "part-01.jsonl.gz").write_bytes(gzip.compress(b'{"text": "1"}\n{"txt": 2}\n'))
    with pytest.raises(DataError, match="part-01.jsonl.gz, line 2"):
        first_rows(make_stream(names, lanes=2), 4)
