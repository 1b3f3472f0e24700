"""The data state of a checkpoint, which may be damaged: each value is used, or refused by
its name.
"""

from __future__ import annotations

import copy
import itertools
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
    other = Numbers(500, 4)
    other.seq_len = SEQ
    other.sequence = lambda index: stream.padding()  # type: ignore[method-assign]
    return MixedRows(
        {"stream": stream, "numbers": other}, {0: {"stream": 1, "numbers": 2}}, slots=4
    )


def _loader(names: list[str], kind: str) -> TrainLoader:
    return TrainLoader(_rows(names, kind), 8, 8, skip=[(8, 16)])


def _variants(value: Any, hostile: Any) -> Iterator[Any]:
    """Yield a value with each of its parts replaced, and all of it."""
    yield hostile
    keys: Any = value if isinstance(value, dict) else ()
    if isinstance(value, list):
        keys = range(len(value))
    for key in keys:
        for other in _variants(value[key], hostile):
            changed = copy.copy(value)
            changed[key] = other
            yield changed


def _state(names: list[str], kind: str) -> dict[str, Any]:
    loader = _loader(names, kind)
    for _ in range(4):
        loader.next_step()
    state: dict[str, Any] = json.loads(json.dumps(loader.state_dict()))
    return state


@pytest.mark.parametrize("kind", ["text", "stream", "mixture"])
def test_every_value_of_a_state_is_used_or_refused_by_its_name(names, kind):
    """Each value at each place: a row comes, or a DataError; nothing else, such as an
    IndexError.
    """
    state = _state(names, kind)
    refused = 0
    assert state["left_out"] == [[8, 16]]
    for hostile in HOSTILE:
        for variant in itertools.islice(_variants(state, hostile), 1, None):
            loader = _loader(names, kind)
            try:
                loader.load_state_dict(variant)
                if loader.steps_left != 0:
                    loader.next_step()
            except DataError as error:
                refused += 1
                assert not isinstance(error, StateError) or error.exit_code == exit_codes.CHECKPOINT
    assert refused > (20 if kind == "text" else 200)


def test_the_refusal_names_entry_and_value(names):
    state = _state(names, "stream")
    state["left_out"] = [[16, 8]]
    with pytest.raises(StateError, match=r"left_out\[0\] = \[16, 8\] is no range of sequences"):
        _loader(names, "stream").load_state_dict(state)
    state = _state(names, "stream")
    state["rows"]["cursors"][1][0] = 0
    with pytest.raises(StateError, match=r"cursors\[1\], lane = 0 is there twice"):
        _loader(names, "stream").load_state_dict(state)
