"""A mixture's state in a checkpoint: its checks, see `titanlite.data.state`, and its values."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from titanlite.data.mixtures.turns import Segment, Weights
from titanlite.data.state import mapping, refusal, sequence, whole_number


def check_mixture(state: dict[str, Any]) -> None:
    """Check a mixture's state, without those of its sources. Raises StateError."""
    slots = whole_number(state.get("slots"), "slots", least=1)
    names = sequence(state.get("names"), "names")
    if not all(isinstance(name, str) for name in names) or len(set(names)) < len(names):
        raise refusal("names", names, "no list of different names")
    _check_plan(state.get("plan"), len(names))
    for name, seed in mapping(state.get("seeds", {}), "seeds").items():
        whole_number(seed, f"seeds.{name}")
    for name, source in mapping(state.get("sources", {}), "sources").items():
        lanes = mapping(source, f"sources.{name}").get("lanes", slots)
        if lanes != slots:
            raise refusal(f"sources.{name}.lanes", lanes, f"not the number of slots, {slots}")
    before = -1
    for number, entry in enumerate(sequence(state.get("segments"), "segments")):
        before = _check_segment(entry, f"segments[{number}]", before, slots, len(names))
    if before < 0:
        raise refusal("segments", [], "empty")


def _check_plan(plan: object, sources: int) -> None:
    """Check the phases, [first sequence, shares] each, and the lengths of the sources."""
    phases, totals = sequence(plan, "plan", 2)
    for number, entry in enumerate(sequence(phases, "plan[0]")):
        name = f"plan[0][{number}]"
        start, shares = sequence(entry, name, 2)
        if number == 0:
            whole_number(start, name, end=1)
        else:
            whole_number(start, name)
        _check_shares(shares, name, sources)
    if not phases:
        raise refusal("plan[0]", phases, "empty")
    for total in sequence(totals, "plan[1]", sources):
        if total is not None:
            whole_number(total, "plan[1]")


def _check_shares(shares: object, name: str, sources: int) -> None:
    for share in sequence(shares, f"{name}, shares", sources):
        if type(share) not in (int, float) or not math.isfinite(share) or share < 0:
            raise refusal(f"{name}, shares", share, "no share")


def _check_segment(entry: object, name: str, before: int, slots: int, sources: int) -> int:
    """Check one segment.

    It begins with `before` or later, the first one (-1) with sequence 0. Return where it does.
    """
    start, weights, base = sequence(entry, name, 3)
    if before < 0:
        whole_number(start, f"{name}, start", end=1)
    else:
        whole_number(start, f"{name}, start", least=before)
    _check_shares(weights, name, sources)
    for turns in sequence(base, f"{name}, turns", slots):
        for turn in sequence(turns, f"{name}, turns", sources):
            whole_number(turn, f"{name}, turns")
    return int(start)


@dataclass(frozen=True)
class SavedMixture:
    """What a state says of the sources that are there now: 0 for those that it does not have.

    `names`, `totals`: of its own sources, and their sequences.
    """

    names: list[str]
    totals: list[int | None]
    #: First sequence → shares.
    phases: dict[int, Weights]
    segments: list[Segment]


def read_state(state: Mapping[str, Any], names: Sequence[str]) -> SavedMixture:
    """Read a state that is checked. names: of the sources now."""
    number_of = {name: number for number, name in enumerate(state["names"])}

    def of_ours(values: Sequence[Any]) -> tuple[Any, ...]:
        found = []
        for name in names:
            value = 0
            if name in number_of:
                value = values[number_of[name]]
            found.append(value)
        return tuple(found)

    segments: list[Segment] = []
    for start, weights, base in state["segments"]:
        turns = np.array([of_ours(given) for given in base], dtype=np.int64)
        segments.append(Segment(start, of_ours(weights), turns))
    phases, totals = state["plan"]
    return SavedMixture(
        names=state["names"],
        totals=totals,
        phases={start: of_ours(weights) for start, weights in phases},
        segments=segments,
    )
