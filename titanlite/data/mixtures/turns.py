"""The turns of a mixture (see `mixed_rows.py`): which source has each, how many each has had."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from titanlite.data.epoch_order import epoch_order

#: Turns after which shares are exact; a source gets at least one of them.
_SCHEDULE = 4096

#: Shares of the sources, in their order; only their ratios count.
Weights = tuple[float, ...]
Counts = NDArray[np.int64]


@dataclass(frozen=True)
class Segment:
    """Sequences from `start` on.

    `weights` [sources] are 0 for one that is served. `base` [slots, sources] has each slot's turns
    before.
    """

    start: int
    weights: Weights
    base: Counts

    @property
    def has_sources(self) -> bool:
        return any(self.weights)


class Turns:
    """The turns of `slots` slots; sequence i is a turn of slot i % slots."""

    def __init__(self, names: Sequence[str], slots: int, seed: int) -> None:
        self.names = tuple(names)
        self.slots = slots
        #: Start of each slot in the schedule.
        self._begin = epoch_order(max(slots, _SCHEDULE), seed, 0)[:slots] % _SCHEDULE

    def first_segment(self, weights: Weights) -> Segment:
        return Segment(0, weights, np.zeros((self.slots, len(self.names)), dtype=np.int64))

    def locate(self, segment: Segment, index: int) -> tuple[int, int]:
        # Any V sequences in a row have one of each slot.
        turn = (index - segment.start) // self.slots
        slot = index % self.slots
        source = _schedule(segment.weights, self.names).source(int(self._begin[slot]) + turn)
        given = int(self._given(segment, turn)[slot, source])
        return source, given * self.slots + slot

    def given_before(self, segment: Segment, index: int) -> Counts:
        """Return [slots, sources]: the sequences of each source before `index`, at or after the
        segment's start.
        """
        # Each slot's first sequence in the segment.
        first = segment.start + (np.arange(self.slots) - segment.start) % self.slots
        turns: Counts = -(-(index - first) // self.slots)
        return self._given(segment, turns)

    def _given(self, segment: Segment, turns: int | Counts) -> Counts:
        """Return [slots, sources]: the sequences of each source before this turn, or each slot's
        turn.
        """
        if not segment.has_sources:
            return segment.base
        schedule = _schedule(segment.weights, self.names)
        before = schedule.upto(self._begin)
        return segment.base + schedule.upto(self._begin + turns) - before

    def where_dry(self, segment: Segment, limits: Sequence[int | None]) -> Segment | None:
        """Return the segment that begins where a source has served its epochs, if one does.

        `limits` are sequences of each source.
        """
        # Sources without a share may be over a limit that was lowered.
        active = np.array(segment.weights) > 0
        if not any(limit is not None for limit, on in zip(limits, active, strict=True) if on):
            return None
        # Sequences of a source that a slot can serve: [slots, sources].
        most = np.array([np.iinfo(np.int64).max if one is None else one for one in limits])
        room: Counts = -(-(most[None, :] - np.arange(self.slots)[:, None]) // self.slots)

        def fits(turns: int) -> bool:
            return bool((self._given(segment, turns) <= room)[:, active].all())

        turns = _most(fits)
        over: NDArray[np.bool_] = np.any(self._given(segment, turns + 1) > room, axis=0)
        weights = list(segment.weights)
        for source in np.flatnonzero(over):
            weights[source] = 0.0
        start = segment.start + turns * self.slots
        return Segment(start, tuple(weights), self._given(segment, turns))


def _most(fits: Callable[[int], bool]) -> int:
    """Return the largest number that fits, if all numbers up to one do; 0 is not asked."""
    low = 0
    high = 1
    while fits(high):
        high *= 2
    while high - low > 1:
        middle = (low + high) // 2
        if fits(middle):
            low = middle
        else:
            high = middle
    return low


class _Schedule:
    """The turns of one set of weights, whatever the order of the sources."""

    def __init__(self, weights: Weights, names: Sequence[str]) -> None:
        with_share = [source for source, weight in enumerate(weights) if weight]
        served = np.array(sorted(with_share, key=lambda source: names[source]))
        shares = np.array(weights)[served] / sum(weights)
        # Each source has at least one turn, and the largest remainders have the rest.
        count = np.maximum(np.floor(shares * _SCHEDULE).astype(np.int64), 1)
        while count.sum() != _SCHEDULE:
            behind = shares * _SCHEDULE - count
            if count.sum() < _SCHEDULE:
                count[np.argmax(behind)] += 1
            else:
                count[np.argmin(behind)] -= 1
        # Each turn goes to the source that is furthest behind its share.
        given = np.zeros_like(count)
        self._turns = np.empty(_SCHEDULE, dtype=np.int64)
        self._before = np.zeros((_SCHEDULE + 1, len(weights)), dtype=np.int64)
        for turn in range(_SCHEDULE):
            chosen = np.argmax(count * (turn + 1) - given * _SCHEDULE)
            self._turns[turn] = served[chosen]
            given[chosen] += 1
            self._before[turn + 1, served] = given

    def source(self, turn: int) -> int:
        return int(self._turns[turn % _SCHEDULE])

    def upto(self, turns: Counts) -> Counts:
        """Return turns of each source before each of these: [turns, sources]."""
        rounds, rest = np.divmod(turns, _SCHEDULE)
        return rounds[:, None] * self._before[-1] + self._before[rest]


@lru_cache(maxsize=64)
def _schedule(weights: Weights, names: tuple[str, ...]) -> _Schedule:
    return _Schedule(weights, names)
