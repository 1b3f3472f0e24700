"""Checks of a stream's state in a checkpoint, see `titanlite.data.state`."""

from __future__ import annotations

from typing import Annotated, Any, NamedTuple

from msgspec import Meta, Struct

from titanlite.data.state import Positive, Whole, checked, refusal


class _Cursor(NamedTuple):
    """Where a lane stands, see `lanes.Place`, after `served` rows."""

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
    """Check a stream's state.

    lanes: where the state has no number; files: of the stream. Raises StateError.
    """
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
