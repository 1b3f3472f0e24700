"""Ranges of the data order that training skips.

A range is [first, end) by global index of sequences; several ranges are sorted and do not touch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from titanlite.config.data_sections import steps_of
from titanlite.data.step_sizes import Course

Range = tuple[int, int]


def ranges_of_steps(steps: Iterable[int | str], course: Course) -> tuple[Range, ...]:
    """Return the sequences of `data.skip_steps`, steps as 120 or "200-250", from 1.

    Step n takes the sequences of the nth step of an undisturbed run of this course.
    """
    found: list[Range] = []
    for one in steps:
        first, last = steps_of(one)
        found.append((course.position_after(first - 1), course.position_after(last)))
    return merged(found)


def merged(ranges: Iterable[Sequence[int]]) -> tuple[Range, ...]:
    """Return sorted ranges, joined if they overlap or touch."""
    found: list[Range] = []
    for first, end in sorted((one[0], one[1]) for one in ranges if one[0] < one[1]):
        if not found or first > found[-1][1]:
            found.append((first, end))
            continue
        last_first, last_end = found[-1]
        found[-1] = (last_first, max(end, last_end))
    return tuple(found)


def before(position: int, ranges: Iterable[Range]) -> tuple[Range, ...]:
    """Return the part of the ranges before `position`."""
    return tuple((first, min(end, position)) for first, end in ranges if first < position)


def without(ranges: Iterable[Range], others: Iterable[Range]) -> tuple[Range, ...]:
    """Return the part of `ranges` that is in none of `others`."""
    left = list(ranges)
    for first, end in others:
        pieces: list[Range] = []
        for left_first, left_end in left:
            pieces.append((left_first, min(left_end, first)))
            pieces.append((max(left_first, end), left_end))
        left = [piece for piece in pieces if piece[0] < piece[1]]
    return merged(left)


def count(first: int, end: int, ranges: Iterable[Range]) -> int:
    """Count the sequences of [first, end) that the ranges skip."""
    found = 0
    for range_first, range_end in ranges:
        found += max(0, min(range_end, end) - max(range_first, first))
    return found


def advance(position: int, number: int, ranges: Iterable[Range]) -> int:
    """Return the position after the next `number` sequences that no range skips."""
    for first, end in ranges:
        free = max(first - position, 0)
        if number <= free:
            break
        number -= free
        position = max(position, end)
    return position + number


def take(position: int, number: int, ranges: Iterable[Range]) -> list[int]:
    """Return the next `number` sequences from `position` that no range skips."""
    taken: list[int] = []
    for first, end in ranges:
        if first > position:
            taken += range(position, min(first, position + number - len(taken)))
        if len(taken) == number:
            return taken
        position = max(position, end)
    return [*taken, *range(position, position + number - len(taken))]


def served_already(skip: Iterable[Range], state: dict[str, Any]) -> tuple[Range, ...]:
    """Return the part of these ranges before a loader's `state`."""
    past = before(state["next_sequence"], merged(skip))
    return without(past, merged(state.get("left_out", ())))


def skip_to(data: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Any]:
    """Return the loader state `data` at the place of `after`, skipping the text between."""
    between = data["next_sequence"], after["next_sequence"]
    left_out = [list(stretch) for stretch in merged([*data.get("left_out", ()), between])]
    moved = {**data, "next_sequence": between[1], "left_out": left_out}
    served = after.get("rows", {})
    if "segments" in served:
        # A mixture: the stretch that is skipped had the shares of this run, not those of the
        # checkpoint.
        order = {name: served[name] for name in ("names", "plan", "segments")}
        moved["rows"] = {**data.get("rows", {}), "slots": served["slots"], **order}
    return moved
