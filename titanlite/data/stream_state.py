"""Checks of a stream's state in a checkpoint, see `titanlite.data.state`."""

from __future__ import annotations

import re
from typing import Any

from titanlite.data.state import refusal, sequence, whole_number

#: A commit, or nothing.
_REVISION = re.compile("[0-9a-f]*")
#: Numbers of a lane's cursor, in their order.
_CURSOR = ("lane", "count", "epoch", "shard", "row", "document", "offset")


def check_stream(state: dict[str, Any], lanes: int, files: int) -> None:
    """Check a stream's state.

    lanes: where the state has no number; files: of the stream. Raises StateError.
    """
    lanes = whole_number(state.get("lanes", lanes), "lanes", least=1)
    revision = state.get("revision", "")
    if not isinstance(revision, str) or not _REVISION.fullmatch(revision):
        raise refusal("revision", revision, "no commit")
    seen: set[int] = set()
    for number, entry in enumerate(sequence(state.get("cursors", []), "cursors")):
        name = f"cursors[{number}]"
        cursor = sequence(entry, name, len(_CURSOR))
        for part, value in zip(_CURSOR, cursor, strict=True):
            whole_number(value, f"{name}, {part}")
        lane, shard = cursor[0], cursor[_CURSOR.index("shard")]
        whole_number(lane, f"{name}, lane", end=lanes)
        whole_number(shard, f"{name}, shard", end=files_of_lane(lane, lanes, files))
        if lane in seen:
            raise refusal(f"{name}, lane", lane, "there twice")
        seen.add(lane)


def files_of_lane(lane: int, lanes: int, files: int) -> int:
    """Return how many files a lane reads in an epoch: its own, or one that it shares with
    others.
    """
    return len(range(lane, files, lanes)) if files >= lanes else 1
