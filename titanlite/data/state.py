"""Checks of the data state in a checkpoint, which may be damaged or somebody else's."""

from __future__ import annotations

from typing import Any

from titanlite import exit_codes
from titanlite.data import DataError

#: No number of a state is larger. Each fits into 64 bits, and so does its product with a small one.
MOST = 1 << 53


class StateError(DataError):
    """The data state in a checkpoint holds a value that no run writes; the message names it."""

    exit_code = exit_codes.CHECKPOINT


def refusal(name: str, value: object, wanted: str) -> StateError:
    """Return the error for an entry of the data state. wanted: what it should be."""
    return StateError(
        f"the data state in the checkpoint is not valid: {name} = {value!r:.80} is {wanted}"
    )


def whole_number(value: object, name: str, least: int = 0, end: int = MOST) -> int:
    """Return a whole number from `least` to below `end`. Raises StateError."""
    if type(value) is not int or not least <= value < end:
        limit = f" below {end}" if end < MOST else ""
        raise refusal(name, value, f"no whole number from {least}{limit}")
    return value


def mapping(value: object, name: str) -> dict[str, Any]:
    """Return a dictionary. Raises StateError."""
    if not isinstance(value, dict):
        raise refusal(name, value, "no table")
    return value


def sequence(value: object, name: str, length: int | None = None) -> list[Any]:
    """Return a list (a tuple as one), of this length if it is given. Raises StateError."""
    if not isinstance(value, (list, tuple)):
        raise refusal(name, value, "no list")
    if length is not None and len(value) != length:
        raise refusal(name, value, f"no list of {length} values")
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
            raise refusal(where, entry, f"no range of sequences before next_sequence = {position}")
        found.append((first, end))
    return found


def check_loader(state: dict[str, Any]) -> None:
    """Check a loader's state, without that of its rows. Raises StateError."""
    position = whole_number(state.get("next_sequence"), "next_sequence")
    ranges_before(state.get("left_out", []), position, "left_out")
    mapping(state.get("rows", {}), "rows")
