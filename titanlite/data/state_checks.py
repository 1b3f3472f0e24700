"""Checks of the data state in a checkpoint, which may be damaged or somebody else's."""

from __future__ import annotations

from typing import Annotated, Any, NamedTuple, TypeAlias, TypeVar

import msgspec
from msgspec import Meta, Struct

from titanlite import exit_codes
from titanlite.data import DataError

#: No number of a state is as large. Each fits into 64 bits, and so does its product with a small
#: one.
Whole: TypeAlias = Annotated[int, Meta(ge=0, lt=1 << 53)]
Positive: TypeAlias = Annotated[int, Meta(ge=1, lt=1 << 53)]

_T = TypeVar("_T")


class StateError(DataError):
    """The data state in a checkpoint holds a value that no run writes."""

    exit_code = exit_codes.CHECKPOINT


class _Loader(Struct):
    next_sequence: Whole
    #: Ranges [first, end).
    left_out: list[tuple[Whole, Whole]] = []
    rows: dict[str, Any] = {}


def refusal(name: str, value: object, wanted: str) -> StateError:
    """Return the error for an entry, which should be as `wanted` says."""
    return StateError(
        f"the data state in the checkpoint is not valid: {name} = {value!r:.80} is {wanted}"
    )


def checked(value: object, kind: type[_T], name: str) -> _T:
    """Return an entry of the state as this type. Raises StateError with its place."""
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        raise StateError(
            f"the data state in the checkpoint is not valid: {name}: {error}"
        ) from None


def check_loader(state: object) -> None:
    """Check a loader's state, without that of its rows. Raises StateError."""
    loader = checked(state, _Loader, "data")
    position = loader.next_sequence
    for number, (first, end) in enumerate(loader.left_out):
        if not first <= end <= position:
            wanted = f"no range of sequences before next_sequence = {position}"
            raise refusal(f"left_out[{number}]", [first, end], wanted)


class _Cursor(NamedTuple):
    lane: Whole
    served: Whole
    epoch: Whole
    shard: Whole
    row: Whole
    document: Whole
    offset: Whole


class _Stream(Struct):
    lanes: Positive
    #: A commit, or nothing.
    revision: Annotated[str, Meta(pattern=r"^[0-9a-f]*\Z")] = ""
    cursors: list[_Cursor] = []


def check_stream(state: dict[str, Any], lanes: int, files: int) -> None:
    """Check a stream's state; `lanes` is used if the state has no number. Raises StateError."""
    stream = checked({"lanes": lanes, **state}, _Stream, "rows")
    seen: set[int] = set()
    for number, cursor in enumerate(stream.cursors):
        lane = cursor.lane
        # A lane's own files of an epoch, or one that it shares with others.
        own = range(lane, max(files, lane + 1), stream.lanes)
        if lane >= stream.lanes or cursor.shard >= len(own):
            wanted = f"no place in {stream.lanes} lanes of {files} files"
            raise refusal(f"cursors[{number}]", cursor, wanted)
        if lane in seen:
            raise refusal(f"cursors[{number}], lane", lane, "there twice")
        seen.add(lane)
