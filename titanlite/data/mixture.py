"""Several sources in one order of sequences, each with its share of the tokens.

All sequences have the same length, so shares of sequences are shares of tokens. Source and number of sequence i follow
from i by arithmetic:

- A schedule of `_SCHEDULE` turns gives each source its share, spread evenly.
- Sequence i is turn i // V of slot i % V. V is the number of lanes if a source is a stream, else 1. A slot's sequences
  of a stream are one lane of it, so a rank reads only its own lanes. Each slot begins elsewhere in the schedule.
- A segment is a stretch with one set of shares. A new one begins with a phase, where a source has served its epochs,
  and where a run goes on with other shares than its checkpoint's. Counts go on: no text is repeated or left out.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from titanlite.data import DataError, EndOfData
from titanlite.data.permutation import epoch_order
from titanlite.data.rows import Row, Rows

#: Turns after which shares are exact; a source gets at least one of them.
_SCHEDULE = 4096


@dataclass(frozen=True)
class _Segment:
    """Sequences from `start` on, a multiple of the slots.

    `weights`: [sources], 0 for one that is served. `base`: [slots, sources], the turns that each slot gave before.
    """

    start: int
    weights: tuple[float, ...]
    base: NDArray[np.int64]


class MixedRows:
    """Sequences of several sources by global index.

    Args:
        sources: by name. Their epochs, if any, are their limit in the mixture.
        phases: first sequence → shares from there on, by name; only their ratios count. The first is 0.
        slots: V; the number of lanes of those that are streams.
    """

    def __init__(
        self, sources: Mapping[str, Rows], phases: Mapping[int, Mapping[str, float]], *, seed: int = 0, slots: int = 1
    ) -> None:
        self.names, self.rows = list(sources), list(sources.values())
        self.seq_len, self.seed = self.rows[0].seq_len, seed
        self._phases = {
            start: tuple(shares.get(n, 0.0) for n in self.names) for start, shares in sorted(phases.items())
        }
        self._names = tuple(self.names)
        self._restart(slots)

    @property
    def fingerprint(self) -> str:
        return hashlib.sha256("".join(row.fingerprint for row in self.rows).encode()).hexdigest()

    @property
    def settings(self) -> dict[str, Any]:
        """The settings that decide sequence i, besides the shares: those may change, and are in the state."""
        settings = {name: value for rows in reversed(self.rows) for name, value in rows.settings.items()}
        order = {"seq_len": self.seq_len, "seed": self.seed, "shuffle": settings["shuffle"], "sources": self.names}
        kept = ("mask_documents", "packing", "buffer")
        return {**order, **{name: settings[name] for name in kept if name in settings}}

    @property
    def total_sequences(self) -> int | None:
        last = self._segments[-1]
        return None if any(last.weights) else last.start

    @property
    def tokens_per_epoch(self) -> None:
        return None

    @property
    def shares(self) -> dict[str, float]:
        """The shares of the sequences at the start, by name of the source."""
        return {name: weight / sum(self._phases[0]) for name, weight in zip(self.names, self._phases[0], strict=True)}

    def describe(self) -> str:
        """Return the shares and the sources in words."""
        shares = zip(self.shares.items(), self.rows, strict=True)
        return "; ".join(f"{name} {share:.1%} ({rows.describe()})" for (name, share), rows in shares)

    def sequence(self, index: int) -> Row:
        source, number = self.locate(index)
        return self.rows[source].sequence(number)

    def padding(self) -> Row:
        return self.rows[0].padding()

    def documents_in(self, index: int) -> list[tuple[str, int]]:
        """Return the documents of sequence `index`, each after the source's name."""
        source, number = self.locate(index)
        return [(f"{self.names[source]}: {name}", tokens) for name, tokens in self.rows[source].documents_in(number)]

    def locate(self, index: int) -> tuple[int, int]:
        """Return the source of sequence `index`, and its number there. Raises EndOfData behind the end."""
        segment = self._segment(index)
        if not any(segment.weights):
            raise EndOfData(f"sequence {index}: all sources have served their epochs")
        turn, slot = divmod(index - segment.start, self.slots)
        source = _schedule(segment.weights, self._names).source(int(self._begin[slot]) + turn)
        return source, int(self._given(segment, turn)[slot, source]) * self.slots + slot

    def served(self, index: int) -> dict[str, int]:
        """Return by name how many sequences before `index` are of each source."""
        segment = self._segment(index)
        turns = -(-(index - segment.start - np.arange(self.slots)) // self.slots)
        return dict(zip(self.names, self._given(segment, turns).sum(axis=0).tolist(), strict=True))

    def _segment(self, index: int) -> _Segment:
        return next(segment for segment in reversed(self._segments) if segment.start <= index)

    def state_dict(self) -> dict[str, Any]:
        """Return the segments, and the states of the sources that have one."""
        segments = [[s.start, list(s.weights), s.base.tolist()] for s in self._segments]
        states = {name: state for name, row in zip(self.names, self.rows, strict=True) if (state := row.state_dict())}
        return {"slots": self.slots, "names": self.names, "plan": self._plan(), "segments": segments, "sources": states}

    def merge_states(self, states: Sequence[dict[str, Any]]) -> dict[str, Any]:
        merged = {
            name: row.merge_states([state["sources"][name] for state in states])
            for name, row in zip(self.names, self.rows, strict=True)
            if name in states[0]["sources"]
        }
        return {**states[0], "sources": merged}

    def load_state_dict(self, state: dict[str, Any], position: int = 0) -> None:
        """Go on from `state`; {}: from the start. Other shares than those of the state hold from `position` on."""
        self._restart(state.get("slots", self.slots))
        for name, row in zip(self.names, self.rows, strict=True):
            row.load_state_dict(state.get("sources", {}).get(name, {}))
        if state:
            if gone := [name for name in state["names"] if name not in self.names]:
                raise DataError(
                    f"data.source: the checkpoint's mixture has {', '.join(gone)}; keep it, and give it no share from "
                    "here on by a [[data.phase]] that does not name it"
                )
            column = {name: number for number, name in enumerate(state["names"])}
            old = [column.get(name) for name in self.names]
            self._segments = [
                _Segment(
                    start,
                    tuple(0.0 if i is None else weights[i] for i in old),
                    np.array([[0 if i is None else turns[i] for i in old] for turns in base], dtype=np.int64),
                )
                for start, weights, base in state["segments"]
            ]
            if (state["names"], state["plan"]) != (self.names, self._plan()):
                self._change(position)

    def _change(self, position: int) -> None:
        """Let the phases hold from `position` on, whatever the segments before."""
        start = -(-position // self.slots) * self.slots
        before = [s for s in self._segments if s.start < max(start, 1)]
        shares = [shares for begin, shares in self._phases.items() if begin <= start][-1]
        given = self._given(before[-1], (start - before[-1].start) // self.slots)
        self._segments = [*before, _Segment(start, shares, given)]
        self._extend()

    def _restart(self, slots: int) -> None:
        self.slots = slots
        #: Where each slot begins in the schedule.
        self._begin = epoch_order(max(slots, _SCHEDULE), self.seed, 0)[:slots] % _SCHEDULE
        self._segments = [_Segment(0, self._phases[0], np.zeros((slots, len(self.rows)), dtype=np.int64))]
        self._extend()

    def _plan(self) -> list[Any]:
        """Return all that decides the segments, as JSON has it."""
        return [
            [[start, list(shares)] for start, shares in self._phases.items()],
            [r.total_sequences for r in self.rows],
        ]

    def _given(self, segment: _Segment, turns: int | NDArray[np.int64]) -> NDArray[np.int64]:
        """Return [slots, sources]: the sequences of each source before this turn of the segment, or of each slot."""
        if not any(segment.weights):
            return segment.base
        schedule = _schedule(segment.weights, self._names)
        return segment.base + schedule.upto(self._begin + turns) - schedule.upto(self._begin)

    def _extend(self) -> None:
        """Add the segments after the last one."""
        while True:
            last = self._segments[-1]
            dry = self._dry(last)
            # Of several that begin with the same turn the last one counts.
            phases = {-(-start // self.slots) * self.slots: shares for start, shares in self._phases.items()}
            after = next(((start, shares) for start, shares in phases.items() if start > last.start), None)
            if after is not None and (dry is None or after[0] <= dry.start):
                given = self._given(last, (after[0] - last.start) // self.slots)
                self._segments.append(_Segment(after[0], after[1], given))
            elif dry is not None:
                self._segments.append(dry)
            else:
                return

    def _dry(self, segment: _Segment) -> _Segment | None:
        """Return the segment that begins where a source has served its epochs; None if none does."""
        limits = [row.total_sequences for row in self.rows]
        if all(limit is None for limit, weight in zip(limits, segment.weights, strict=True) if weight):
            return None
        most = np.array([np.iinfo(np.int64).max if limit is None else limit for limit in limits])
        # [slots, sources]: sequences of a source that a slot can serve.
        room = -(-(most[None, :] - np.arange(self.slots)[:, None]) // self.slots)

        # Those without a share may be over a limit that was lowered.
        active = np.array(segment.weights) > 0

        def fits(turns: int) -> bool:
            return bool((self._given(segment, turns) <= room)[:, active].all())

        low, high = 0, 1
        while fits(high):
            high *= 2
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if fits(middle) else (low, middle)
        over: NDArray[np.bool_] = np.any(self._given(segment, low + 1) > room, axis=0)
        weights = tuple(0.0 if full else weight for full, weight in zip(over.tolist(), segment.weights, strict=True))
        return _Segment(segment.start + low * self.slots, weights, self._given(segment, low))


class _Schedule:
    """The turns of one set of weights, which do not depend on the order of the sources."""

    def __init__(self, weights: Sequence[float], names: Sequence[str]) -> None:
        served = np.array(sorted((i for i, weight in enumerate(weights) if weight), key=lambda i: names[i]))
        shares = np.array(weights)[served] / sum(weights)
        # At least one turn each; the rest by the largest remainders.
        count = np.maximum(np.floor(shares * _SCHEDULE).astype(np.int64), 1)
        while count.sum() != _SCHEDULE:
            behind = shares * _SCHEDULE - count
            count[np.argmax(behind)] += 1 if count.sum() < _SCHEDULE else 0
            count[np.argmin(behind)] -= 1 if count.sum() > _SCHEDULE else 0
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

    def upto(self, turns: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return [turns, sources]: turns of each source before each of these."""
        rounds, rest = np.divmod(turns, _SCHEDULE)
        return rounds[:, None] * self._before[-1] + self._before[rest]


@lru_cache(maxsize=64)
def _schedule(weights: tuple[float, ...], names: tuple[str, ...]) -> _Schedule:
    return _Schedule(weights, names)
