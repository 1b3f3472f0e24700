"""The data state of a checkpoint, which may be damaged: each value is used, or refused by
its name.
"""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.shards import SEQ, make_stream
from tests.support.sources import Numbers
from titanlite import exit_codes
from titanlite.data import DataError
from titanlite.data.loader import TrainLoader
from titanlite.data.mixtures.mixed_rows import MixedRows
from titanlite.data.rows import Rows
from titanlite.data.state_checks import StateError

HOSTILE = (-7, "5-1", None, 1.5, math.nan, 1 << 40, True, [], {})


def _rows(names: list[str], kind: str) -> Rows:
    if kind == "text":
        return Numbers(10_000)
    stream = make_stream(names)
    if kind != "mixture":
        return stream
    other = Numbers(total=500, lanes=4)
    other.seq_len = SEQ
    other.sequence = lambda index: stream.padding()  # type: ignore[method-assign]
    return MixedRows(
        {"stream": stream, "numbers": other}, {0: {"stream": 1, "numbers": 2}}, slots=4
    )


def _loader(names: list[str], kind: str) -> TrainLoader:
    return TrainLoader(_rows(names, kind), 8, 8, skip=[(8, 16)])


def _paths(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield path
    entries = (
        value.items()
        if isinstance(value, dict)
        else enumerate(value)
        if isinstance(value, list)
        else ()
    )
    for key, entry in entries:
        yield from _paths(entry, (*path, key))


def _changed(state: dict[str, Any], path: tuple[Any, ...], value: Any) -> dict[str, Any]:
    changed = copy.deepcopy(state)
    place: Any = changed
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    return changed


def _state(names: list[str], kind: str) -> dict[str, Any]:
    loader = _loader(names, kind)
    for _ in range(4):
        loader.next_step()
    state: dict[str, Any] = json.loads(json.dumps(loader.state_dict()))
    return state


@pytest.mark.slow_after(3)
@pytest.mark.parametrize("kind", ["text", "stream", "mixture"])
def test_every_value_of_a_state_is_used_or_refused_by_its_name(names: list[str], kind: str) -> None:
    """Each value at each place: a row comes, or a DataError; nothing else, such as an
    IndexError.
    """
    state = _state(names, kind)
    refused = 0
    assert state["left_out"] == [[8, 16]]
    for path in _paths(state):
        for value in HOSTILE if path else ():
            loader = _loader(names, kind)
            try:
                loader.load_state_dict(_changed(state, path, value))
                if loader.steps_left != 0:
                    loader.next_step()
            except DataError as error:
                refused += 1
                assert not isinstance(error, StateError) or error.exit_code == exit_codes.CHECKPOINT
    assert refused > (20 if kind == "text" else 200)


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        (("left_out", 0), [16, 8], r"left_out\[0\] = \[16, 8\] is no range of sequences before"),
        (("rows", "cursors", 0, 3), 2, r"cursors\[0\] = .* is no place in 4 lanes of \d files"),
        (("rows", "cursors", 1, 0), 0, r"cursors\[1\], lane = 0 is there twice"),
    ],
)
def test_the_refusal_names_entry_and_value(
    names: list[str], path: tuple[Any, ...], value: Any, words: str
) -> None:
    with pytest.raises(StateError, match=words):
        _loader(names, "stream").load_state_dict(_changed(_state(names, "stream"), path, value))
