"""Several sources in one order of sequences, each with its share of the tokens.

All sequences have the same length, so shares of sequences are shares of tokens. Source and number
of sequence i follow from i by arithmetic:

- A schedule of `_SCHEDULE` turns gives each source its share, spread evenly.
- Sequence i is a turn of slot i % V. V is the number of lanes if a source is a stream, else 1. A
  slot's sequences
  of a stream are one lane of it, so a rank reads only its own lanes. Each slot begins elsewhere in
  the schedule.
- A segment is a stretch with one set of shares. A new one begins with a phase, where a source has
  served its epochs, and where a run goes on with other shares than its checkpoint's. Counts go on:
  no text is repeated or left out.
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
from msgspec.structs import replace as replace_fields
from numpy.typing import NDArray

from titanlite.data import DataError, EndOfData
from titanlite.data.permutation import epoch_order
from titanlite.data.rows import Row, Rows

if TYPE_CHECKING:
    from titanlite.config.sections import Training
    from titanlite.data.text import TextReader
from titanlite.data.mixture_state import check_mixture

#: Turns after which shares are exact; a source gets at least one of them.
_SCHEDULE = 4096


@dataclass(frozen=True)
class _Segment:
    """Sequences from `start` on, any sequence.

    `weights`: [sources], 0 for one that is served. `base`: [slots, sources], the turns that each
    slot gave before.
    """

    start: int
    weights: tuple[float, ...]
    base: NDArray[np.int64]


class MixedRows(Rows):
    """Sequences of several sources by global index.

    Args:
        sources: by name. Their epochs, if any, are their limit in the mixture.
        phases: first sequence → shares from there on, by name; only their ratios count. The first
            is 0.
        slots: V; the number of lanes of those that are streams.
    """

    def __init__(
        self,
        sources: Mapping[str, Rows],
        phases: Mapping[int, Mapping[str, float]],
        *,
        seed: int = 0,
        slots: int = 1,
    ) -> None:
        self.names, self.rows = list(sources), list(sources.values())
        self.seq_len, self.seed = self.rows[0].seq_len, seed
        self._names = tuple(self.names)
        #: First sequence → shares: as planned for the run, and as they were and will be.
        self._planned = self._in_order(phases)
        self._phases = self._planned
        #: The latest state was saved with other shares, sources or epochs than hold from its
        #: position on.
        self.changed = False
        self._restart(slots)

    @property
    def mixture(self) -> MixedRows:
        return self

    @property
    def fingerprint(self) -> str:
        return hashlib.sha256("".join(row.fingerprint for row in self.rows).encode()).hexdigest()

    @property
    def settings(self) -> dict[str, Any]:
        """The settings that decide sequence i, besides the shares: those may change, and are in the
        state.
        """
        settings = {
            name: value for rows in reversed(self.rows) for name, value in rows.settings.items()
        }
        order = {
            "seq_len": self.seq_len,
            "seed": self.seed,
            "shuffle": settings["shuffle"],
            "sources": self.names,
        }
        kept = ("mask_documents", "packing", "buffer")
        return {**order, **{name: settings[name] for name in kept if name in settings}}

    @property
    def total_sequences(self) -> int | None:
        last = self._segments[-1]
        return None if any(last.weights) else last.start

    @property
    def shares(self) -> dict[str, float]:
        """The shares of the sequences at the start, by name of the source."""
        return {
            name: weight / sum(self._phases[0])
            for name, weight in zip(self.names, self._phases[0], strict=True)
        }

    def describe(self) -> str:
        """Return the shares and the sources in words."""
        shares = zip(self.shares.items(), self.rows, strict=True)
        return "; ".join(
            f"{name} {share:.1%} ({rows.describe()})" for (name, share), rows in shares
        )

    def sequence(self, index: int) -> Row:
        source, number = self.locate(index)
        return self.rows[source].sequence(number)

    def padding(self) -> Row:
        return self.rows[0].padding()

    def documents_in(self, index: int) -> list[tuple[str, int]]:
        """Return the documents of sequence `index`, each after the source's name."""
        source, number = self.locate(index)
        return [
            (f"{self.names[source]}: {name}", tokens)
            for name, tokens in self.rows[source].documents_in(number)
        ]

    def locate(self, index: int) -> tuple[int, int]:
        """Return the source of sequence `index`, and its number there.

        Raises EndOfData behind the end.
        """
        segment = self._segment(index)
        if not any(segment.weights):
            raise EndOfData(f"sequence {index}: all sources have served their epochs")
        # Any V sequences in a row have one of each slot.
        turn, slot = (index - segment.start) // self.slots, index % self.slots
        source = _schedule(segment.weights, self._names).source(int(self._begin[slot]) + turn)
        return source, int(self._given(segment, turn)[slot, source]) * self.slots + slot

    def served(self, index: int) -> dict[str, int]:
        """Return by name how many sequences before `index` are of each source."""
        given = self._given_before(self._segment(index), index)
        return dict(zip(self.names, given.sum(axis=0).tolist(), strict=True))

    def _segment(self, index: int) -> _Segment:
        return next(segment for segment in reversed(self._segments) if segment.start <= index)

    def state_dict(self) -> dict[str, Any]:
        """Return the segments, and the states of the sources that have one."""
        segments = [[s.start, list(s.weights), s.base.tolist()] for s in self._segments]
        states = {
            name: state
            for name, row in zip(self.names, self.rows, strict=True)
            if (state := row.state_dict())
        }
        return {
            "slots": self.slots,
            "names": self.names,
            "plan": self._plan(),
            "segments": segments,
            "sources": states,
        }

    def merge_states(self, states: Sequence[dict[str, Any]]) -> dict[str, Any]:
        merged = {
            name: row.merge_states([state["sources"][name] for state in states])
            for name, row in zip(self.names, self.rows, strict=True)
            if name in states[0]["sources"]
        }
        return {**states[0], "sources": merged}

    def load_state_dict(
        self,
        state: dict[str, Any],
        position: int = 0,
        phases: Mapping[int, Mapping[str, float]] | None = None,
    ) -> None:
        """Go on with sequence `position` from `state`; {}: from the start.

        phases: as of the constructor; None: those. The shares that they have at `position` hold
        from there on, and the sequences before it stay what they were.
        """
        if state:
            check_mixture(state)
        if phases is not None:
            self._planned = self._in_order(phases)
        self._restart(state.get("slots", self.slots))
        for name, row in zip(self.names, self.rows, strict=True):
            row.load_state_dict(state.get("sources", {}).get(name, {}))
        if not state:
            return
        if gone := [name for name in state["names"] if name not in self.names]:
            raise DataError(
                f"data.source: the checkpoint's mixture has {', '.join(gone)}; keep it, and give "
                "it no share from here on by a [[data.phase]] that does not name it"
            )
        self._continue(state, position)

    def _continue(self, state: dict[str, Any], position: int) -> None:
        """Keep what `state` has before `position`, and let the planned phases hold from
        there on.
        """
        column = {name: number for number, name in enumerate(state["names"])}
        columns = [column.get(name) for name in self.names]

        def of_ours(values: Sequence[Any]) -> list[Any]:
            return [0 if number is None else values[number] for number in columns]

        segments = []
        for start, weights, base in state["segments"]:
            turns = np.array([of_ours(given) for given in base], dtype=np.int64)
            segments.append(_Segment(start, tuple(of_ours(weights)), turns))
        old_phases, old_totals = state["plan"]
        past = {start: tuple(of_ours(shares)) for start, shares in old_phases if start <= position}
        planned = {start: shares for start, shares in self._planned.items() if start > position}
        now = [shares for start, shares in self._planned.items() if start <= position][-1]
        last_phase = max(past)
        # Earlier versions began a phase at the next multiple of the slots.
        is_late = not any(last_phase <= segment.start <= position for segment in segments)
        same_text = state["names"] == self.names and old_totals == self._totals()
        self.changed = is_late or not same_text or past[last_phase] != now
        if self.changed:
            # The first segment is needed, to count from.
            segments = [segment for segment in segments if segment.start < max(position, 1)]
            past = {start: shares for start, shares in past.items() if start < position}
            past[position] = now
            segments.append(_Segment(position, now, self._given_before(segments[-1], position)))
        else:
            segments = [segment for segment in segments if segment.start <= position]
        self._phases = {**past, **planned}
        self._segments = segments
        self._extend()

    def _in_order(self, phases: Mapping[int, Mapping[str, float]]) -> dict[int, tuple[float, ...]]:
        return {
            start: tuple(shares.get(name, 0.0) for name in self.names)
            for start, shares in sorted(phases.items())
        }

    def _restart(self, slots: int) -> None:
        self.slots = slots
        is_streamed = any(row.lanes is not None for row in self.rows)
        self.lanes = slots if is_streamed else None
        self.changed = False
        self._phases = self._planned
        #: Where each slot begins in the schedule.
        self._begin = epoch_order(max(slots, _SCHEDULE), self.seed, 0)[:slots] % _SCHEDULE
        self._segments = [
            _Segment(0, self._phases[0], np.zeros((slots, len(self.rows)), dtype=np.int64))
        ]
        self._extend()

    def _plan(self) -> list[Any]:
        """Return all that decides the segments, as JSON has it."""
        return [[[start, list(shares)] for start, shares in self._phases.items()], self._totals()]

    def _totals(self) -> list[int | None]:
        return [row.total_sequences for row in self.rows]

    def _given_before(self, segment: _Segment, index: int) -> NDArray[np.int64]:
        """Return [slots, sources]: the sequences of each source before sequence `index`, at or
        after the segment's.
        """
        # Each slot's first sequence in the segment.
        first = segment.start + (np.arange(self.slots) - segment.start) % self.slots
        turns: NDArray[np.int64] = -(-(index - first) // self.slots)
        return self._given(segment, turns)

    def _given(self, segment: _Segment, turns: int | NDArray[np.int64]) -> NDArray[np.int64]:
        """Return [slots, sources]: the sequences of each source before this turn of the segment, or
        of each slot.
        """
        if not any(segment.weights):
            return segment.base
        schedule = _schedule(segment.weights, self._names)
        return segment.base + schedule.upto(self._begin + turns) - schedule.upto(self._begin)

    def _extend(self) -> None:
        """Add the segments after the last one."""
        while True:
            last = self._segments[-1]
            dry = self._dry(last)
            after = next(
                ((start, shares) for start, shares in self._phases.items() if start > last.start),
                None,
            )
            if after is not None and (dry is None or after[0] <= dry.start):
                given = self._given_before(last, after[0])
                self._segments.append(_Segment(after[0], after[1], given))
            elif dry is not None:
                self._segments.append(dry)
            else:
                return

    def _dry(self, segment: _Segment) -> _Segment | None:
        """Return the segment that begins where a source has served its epochs; None if none
        does.
        """
        limits = [row.total_sequences for row in self.rows]
        if all(
            limit is None for limit, weight in zip(limits, segment.weights, strict=True) if weight
        ):
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
        weights = tuple(
            0.0 if full else weight
            for full, weight in zip(over.tolist(), segment.weights, strict=True)
        )
        return _Segment(segment.start + low * self.slots, weights, self._given(segment, low))


def open_mixture(
    reader: TextReader, training: Training, phases: Mapping[int, Mapping[str, float]]
) -> MixedRows:
    """Open the sources of `data.source`. phases: see `TextReader.train`."""
    data = reader.data
    opened: dict[str, Rows] = {}
    weights: dict[str, float] = {}
    lanes: int | None = None
    for number, source in enumerate(data.source):
        name = source.name or source.path or ""
        # The order of a source is its own, whatever else is mixed. All streams of a mixture have
        # the same lanes.
        settings = replace_fields(data, seed=data.seed ^ zlib.crc32(name.encode()))
        own_reader = replace(reader, data=settings, lanes=lanes)
        key = f"data.source[{number}]"
        rows = own_reader.open_with_end(source, key, training.seq_len, source.epochs)
        lanes = lanes or rows.lanes
        opened[name] = rows
        weights[name] = source.weight
    return MixedRows(opened, {0: weights, **phases}, seed=data.seed, slots=lanes or 1)


class _Schedule:
    """The turns of one set of weights, which do not depend on the order of the sources."""

    def __init__(self, weights: Sequence[float], names: Sequence[str]) -> None:
        served = np.array(
            sorted((i for i, weight in enumerate(weights) if weight), key=lambda i: names[i])
        )
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
