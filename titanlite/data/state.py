"""Checks of the data state in a checkpoint, which may be damaged or somebody else's."""

from __future__ import annotations

import math
import re
from typing import Any

from titanlite import exit_codes
from titanlite.data import DataError

#: No number of a state is larger: each fits into 64 bits, and so does its product with a small one.
_MOST = 1 << 53
#: A commit, or nothing.
_REVISION = re.compile("[0-9a-f]*")
#: Numbers of a lane's cursor, in their order.
_CURSOR = ("lane", "count", "epoch", "shard", "row", "document", "offset")


class StateError(DataError):
    """The data state in a checkpoint holds a value that no run writes; the message names it."""

    exit_code = exit_codes.CHECKPOINT


def refuse(name: str, value: object, wanted: str) -> StateError:
    """Return the error for an entry of the data state. wanted: what it should be."""
    return StateError(
        f"the data state in the checkpoint is not valid: {name} = {value!r:.80} is {wanted}"
    )


def whole_number(value: object, name: str, least: int = 0, end: int = _MOST) -> int:
    """Return a whole number from `least` to below `end`. Raises StateError."""
    if type(value) is not int or not least <= value < end:
        limit = f" below {end}" if end < _MOST else ""
        raise refuse(name, value, f"no whole number from {least}{limit}")
    return value


def mapping(value: object, name: str) -> dict[str, Any]:
    """Return a dictionary. Raises StateError."""
    if not isinstance(value, dict):
        raise refuse(name, value, "no table")
    return value


def sequence(value: object, name: str, length: int | None = None) -> list[Any]:
    """Return a list (a tuple as one), of this length if it is given. Raises StateError."""
    if not isinstance(value, (list, tuple)):
        raise refuse(name, value, "no list")
    if length is not None and len(value) != length:
        raise refuse(name, value, f"no list of {length} values")
    return list(value)


def ranges_before(value: object, position: int, name: str) -> list[tuple[int, int]]:
    """Return ranges [first, end) of sequences that end at `position` or before. Raises
    StateError.
    """
    found = []
    for number, entry in enumerate(sequence(value, name)):
        where = f"{name}[{number}]"
        first, end = sequence(entry, where, 2)
        whole_number(first, where)
        whole_number(end, where)
        if not first <= end <= position:
            raise refuse(where, entry, f"no range of sequences before next_sequence = {position}")
        found.append((first, end))
    return found


def check_loader(state: dict[str, Any]) -> None:
    """Check a loader's state, without that of its rows. Raises StateError."""
    position = whole_number(state.get("next_sequence"), "next_sequence")
    ranges_before(state.get("left_out", []), position, "left_out")
    mapping(state.get("rows", {}), "rows")


def check_stream(state: dict[str, Any], lanes: int, files: int) -> None:
    """Check a stream's state.

    lanes: where the state has no number; files: of the stream. Raises StateError.
    """
    lanes = whole_number(state.get("lanes", lanes), "lanes", least=1)
    revision = state.get("revision", "")
    if not isinstance(revision, str) or not _REVISION.fullmatch(revision):
        raise refuse("revision", revision, "no commit")
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
            raise refuse(f"{name}, lane", lane, "there twice")
        seen.add(lane)


def files_of_lane(lane: int, lanes: int, files: int) -> int:
    """Return how many files a lane reads in an epoch: its own, or one that it shares with
    others.
    """
    return len(range(lane, files, lanes)) if files >= lanes else 1


def check_mixture(state: dict[str, Any]) -> None:
    """Check a mixture's state, without those of its sources. Raises StateError."""
    slots = whole_number(state.get("slots"), "slots", least=1)
    names = sequence(state.get("names"), "names")
    if not all(isinstance(name, str) for name in names) or len(set(names)) < len(names):
        raise refuse("names", names, "no list of different names")
    _check_plan(state.get("plan"), len(names))
    for name, source in mapping(state.get("sources", {}), "sources").items():
        lanes = mapping(source, f"sources.{name}").get("lanes", slots)
        if lanes != slots:
            raise refuse(f"sources.{name}.lanes", lanes, f"not the number of slots, {slots}")
    before = -1
    for number, entry in enumerate(sequence(state.get("segments"), "segments")):
        before = _check_segment(entry, f"segments[{number}]", before, slots, len(names))
    if before < 0:
        raise refuse("segments", [], "empty")


def _check_plan(plan: object, sources: int) -> None:
    """Check the phases, [first sequence, shares] each, and the lengths of the sources."""
    phases, totals = sequence(plan, "plan", 2)
    for number, entry in enumerate(sequence(phases, "plan[0]")):
        name = f"plan[0][{number}]"
        start, shares = sequence(entry, name, 2)
        whole_number(start, name, end=_MOST if number else 1)
        _check_shares(shares, name, sources)
    if not phases:
        raise refuse("plan[0]", phases, "empty")
    for total in sequence(totals, "plan[1]", sources):
        if total is not None:
            whole_number(total, "plan[1]")


def _check_shares(shares: object, name: str, sources: int) -> None:
    for share in sequence(shares, f"{name}, shares", sources):
        if type(share) not in (int, float) or not math.isfinite(share) or share < 0:
            raise refuse(f"{name}, shares", share, "no share")


def _check_segment(entry: object, name: str, before: int, slots: int, sources: int) -> int:
    """Check one segment.

    It begins with `before` or later, the first one (-1) with sequence 0. Return where it does.
    """
    start, weights, base = sequence(entry, name, 3)
    whole_number(start, f"{name}, start", least=max(before, 0), end=1 if before < 0 else _MOST)
    _check_shares(weights, name, sources)
    for turns in sequence(base, f"{name}, turns", slots):
        for turn in sequence(turns, f"{name}, turns", sources):
            whole_number(turn, f"{name}, turns")
    return int(start)
