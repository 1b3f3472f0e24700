"""Several sources in one order of sequences, each with its share of the tokens.

All sequences have the same length, so shares of sequences are shares of tokens. Source and number
of sequence i follow from i by arithmetic:

- A schedule of 4,096 turns gives each source its share, spread evenly (`turns.py`).
- Sequence i is a turn of slot i % V. V is the number of lanes if a source is a stream, else 1. A
  slot's sequences of a stream are one lane of it, so a rank reads only its own lanes. Each slot
  begins elsewhere in the schedule.
- A segment is a stretch with one set of shares. A new one begins with a phase, or where a source
  has served its epochs. It also begins where a run resumes with other shares than its checkpoint's.
  Counts continue: no text is repeated or skipped.
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace as replace_fields

from titanlite.config.urls import public_name
from titanlite.data import DataError, EndOfData
from titanlite.data.mixtures.state import check_mixture, read_state
from titanlite.data.mixtures.turns import Segment, Turns, Weights
from titanlite.data.rows import Row, Rows
from titanlite.data.token_paths import is_of_tokens

if TYPE_CHECKING:
    from titanlite.config.data_sections import DataSource
    from titanlite.data.dataset_builder import TextReader
    from titanlite.data.step_sizes import Course


class MixedRows(Rows):
    """Sequences of several sources by global index.

    Args:
        sources: by name. Their epochs, if any, are their limit in the mixture.
        phases: first sequence → shares by name; only their ratios count. The first is 0.
        slots: V; the number of lanes of those that are streams.
    """

    sets_length = False

    def __init__(
        self,
        sources: Mapping[str, Rows],
        phases: Mapping[int, Mapping[str, float]],
        *,
        seed: int = 0,
        slots: int = 1,
    ) -> None:
        self.names = list(sources)
        self.rows = list(sources.values())
        self.seq_len = self.rows[0].seq_len
        self.seed = seed
        #: First sequence → shares: as planned for the run, and as they were and will be.
        self._planned = self._in_order(phases)
        self._phases = self._planned
        self._restart(slots)

    @property
    def fingerprint(self) -> str:
        return hashlib.sha256("".join(row.fingerprint for row in self.rows).encode()).hexdigest()

    @property
    def settings(self) -> dict[str, Any]:
        of_sources: dict[str, Any] = {}
        # If sources differ, the first one counts.
        for rows in reversed(self.rows):
            of_sources.update(rows.settings)
        settings = {
            "seq_len": self.seq_len,
            "seed": self.seed,
            "shuffle": of_sources["shuffle"],
            "sources": self.names,
        }
        for name in ("mask_documents", "packing", "documents", "buffer"):
            if name in of_sources:
                settings[name] = of_sources[name]
        return settings

    @property
    def total_sequences(self) -> int | None:
        last = self._segments[-1]
        return None if last.has_sources else last.start

    @property
    def shares(self) -> dict[str, float]:
        weights = self._phases[0]
        total = sum(weights)
        return {name: weight / total for name, weight in zip(self.names, weights, strict=True)}

    def describe(self) -> str:
        shares = self.shares
        sources = zip(self.names, self.rows, strict=True)
        return "; ".join(f"{name} {shares[name]:.1%} ({rows.describe()})" for name, rows in sources)

    def sequence(self, index: int) -> Row:
        source, number = self.locate(index)
        return self.rows[source].sequence(number)

    def padding(self) -> Row:
        return self.rows[0].padding()

    def documents_in(self, index: int) -> list[tuple[str, int]]:
        source, number = self.locate(index)
        documents = self.rows[source].documents_in(number)
        return [(f"{self.names[source]}: {name}", tokens) for name, tokens in documents]

    def locate(self, index: int) -> tuple[int, int]:
        """Return source and number there of sequence `index`. Raises EndOfData behind the end."""
        segment = self._segment(index)
        if not segment.has_sources:
            raise EndOfData(f"sequence {index}: all sources have served their epochs")
        return self._turns.locate(segment, index)

    def texts(self, name: str = "") -> dict[str, Rows]:
        return dict(zip(self.names, self.rows, strict=True))

    def text_at(self, index: int, name: str = "") -> tuple[str, Rows, int]:
        source, number = self.locate(index)
        return self.names[source], self.rows[source], number

    def check_length(self, course: Course, steps: int) -> None:
        sequences = self.total_sequences
        if sequences is None or sequences >= course.position_after(steps):
            return
        last = course.steps_with_rows(sequences + 1) - 1
        raise DataError(
            f"training.steps: the epochs of all sources end after step {last} of {steps}. Set it "
            f"to {last} at most, or give one source no epochs"
        )

    def served(self, index: int, name: str = "") -> dict[str, int]:
        given = self._turns.given_before(self._segment(index), index)
        return dict(zip(self.names, given.sum(axis=0).tolist(), strict=True))

    def _segment(self, index: int) -> Segment:
        return next(segment for segment in reversed(self._segments) if segment.start <= index)

    def state_dict(self) -> dict[str, Any]:
        sources: dict[str, Any] = {}
        for name, row in zip(self.names, self.rows, strict=True):
            state = row.state_dict()
            if state:
                sources[name] = state
        phases = [[start, list(weights)] for start, weights in self._phases.items()]
        return {
            "slots": self.slots,
            "names": self.names,
            "plan": [phases, self._totals()],
            "segments": [[s.start, list(s.weights), s.base.tolist()] for s in self._segments],
            "sources": sources,
        }

    def merge_states(self, states: Sequence[dict[str, Any]]) -> dict[str, Any]:
        merged: dict[str, Any] = {}
        for name, row in zip(self.names, self.rows, strict=True):
            if name in states[0]["sources"]:
                merged[name] = row.merge_states([state["sources"][name] for state in states])
        return {**states[0], "sources": merged}

    def load_state_dict(
        self,
        state: dict[str, Any],
        position: int = 0,
        phases: Mapping[int, Mapping[str, float]] | None = None,
    ) -> None:
        """Continue with sequence `position` from `state`; {} is the start.

        `phases` None keeps the constructor's. Shares at `position` hold from there on; earlier
        sequences stay what they were.
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
        gone = [public_name(name) for name in state["names"] if name not in self.names]
        if gone:
            raise DataError(
                f"data.source: the checkpoint's mixture has {', '.join(gone)}. Keep it, and give "
                "it no share from here on by a [[data.phase]] that does not name it"
            )
        were, saved = read_state(state, self.names)
        past = {start: weights for start, weights in were.items() if start <= position}
        until_now = [weights for start, weights in self._planned.items() if start <= position]
        ahead = {start: weights for start, weights in self._planned.items() if start > position}
        now = until_now[-1]
        last_phase = max(past)
        is_other_text = state["names"] != self.names or state["plan"][1] != self._totals()
        self.changed = is_other_text or past[last_phase] != now
        if self.changed:
            # The first segment is needed, to count from.
            segments = [one for one in saved if one.start < max(position, 1)]
            given = self._turns.given_before(segments[-1], position)
            segments.append(Segment(position, now, given))
            past = {start: weights for start, weights in past.items() if start < position}
            past[position] = now
        else:
            segments = [one for one in saved if one.start <= position]
        self._phases = {**past, **ahead}
        self._segments = segments
        self._extend()

    def _in_order(self, phases: Mapping[int, Mapping[str, float]]) -> dict[int, Weights]:
        return {
            start: tuple(shares.get(name, 0.0) for name in self.names)
            for start, shares in sorted(phases.items())
        }

    def _restart(self, slots: int) -> None:
        self.slots = slots
        is_streamed = any(row.lanes is not None for row in self.rows)
        self.lanes = slots if is_streamed else None
        self.changed = False
        self._turns = Turns(self.names, slots, self.seed)
        self._phases = self._planned
        self._segments = [self._turns.first_segment(self._phases[0])]
        self._extend()

    def _totals(self) -> list[int | None]:
        return [row.total_sequences for row in self.rows]

    def _extend(self) -> None:
        while True:
            last = self._segments[-1]
            dry = self._turns.where_dry(last, self._totals())
            later = [start for start in self._phases if start > last.start]
            if later and (dry is None or later[0] <= dry.start):
                given = self._turns.given_before(last, later[0])
                self._segments.append(Segment(later[0], self._phases[later[0]], given))
            elif dry is not None:
                self._segments.append(dry)
            else:
                return


def open_mixture(
    reader: TextReader,
    sources: Mapping[str, DataSource],
    seq_len: int,
    phases: Mapping[int, Mapping[str, float]],
) -> MixedRows:
    """Open the sources of `data.source`; `phases` as in `TextReader.train`."""
    data = reader.data
    if data.token_dtype != "auto" and not any(map(is_of_tokens, sources.values())):
        raise DataError(
            "data.token_dtype: no source is of token files; leave the key out, or give a source "
            "its own"
        )
    opened: dict[str, Rows] = {}
    weights: dict[str, float] = {}
    lanes: int | None = None
    places = {source.title: (section, source) for section, source in sources.items()}

    for name, (section, source) in places.items():
        # The order of a source does not depend on the other sources. All streams of a mixture have
        # the same lanes.
        settings = replace_fields(data, seed=data.seed ^ zlib.crc32(name.encode()))
        own_reader = replace(reader, data=settings, lanes=lanes)
        opened[name] = own_reader.open(source, section, seq_len, source.epochs)
        lanes = lanes or opened[name].lanes
        weights[name] = source.weight
    shares = {0: weights, **phases}
    return MixedRows(opened, shares, seed=data.seed, slots=lanes or 1)
