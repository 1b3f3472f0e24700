"""Stretches of the data order that are left out.

A stretch is [first, end) by global index of sequences; several are sorted and do not touch.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

Stretch = tuple[int, int]


def of_steps(steps: Iterable[tuple[int, int]], global_batch: int) -> tuple[Stretch, ...]:
    """The sequences of steps (first, last), counted from 1 as an undisturbed run of this global batch takes them."""
    return merged(((first - 1) * global_batch, last * global_batch) for first, last in steps)


def merged(stretches: Iterable[Sequence[int]]) -> tuple[Stretch, ...]:
    """The same sequences in order, what overlaps or touches made one."""
    found: list[Stretch] = []
    for first, end in sorted((s[0], s[1]) for s in stretches if s[0] < s[1]):
        if found and first <= found[-1][1]:
            found[-1] = found[-1][0], max(end, found[-1][1])
        else:
            found.append((first, end))
    return tuple(found)


def before(position: int, stretches: Iterable[Stretch]) -> tuple[Stretch, ...]:
    """What of them lies before `position`."""
    return tuple((first, min(end, position)) for first, end in stretches if first < position)


def without(stretches: Iterable[Stretch], others: Iterable[Stretch]) -> tuple[Stretch, ...]:
    """What of `stretches` is in none of `others`."""
    left = list(stretches)
    for first, end in others:
        pieces = [((a, min(b, first)), (max(a, end), b)) for a, b in left]
        left = [piece for both in pieces for piece in both if piece[0] < piece[1]]
    return merged(left)


def count(first: int, end: int, stretches: Iterable[Stretch]) -> int:
    """How many sequences of [first, end) are left out."""
    return sum(max(0, min(b, end) - max(a, first)) for a, b in stretches)


def take(position: int, number: int, stretches: Iterable[Stretch]) -> list[int]:
    """The next `number` sequences from `position` on that are not left out."""
    taken: list[int] = []
    for first, end in stretches:
        if first > position:
            taken += range(position, min(first, position + number - len(taken)))
        if len(taken) == number:
            return taken
        position = max(position, end)
    return [*taken, *range(position, position + number - len(taken))]
