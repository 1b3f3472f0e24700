"""A mixture's state in a checkpoint: its values and their checks, by `data.state_checks`."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, TypeAlias

import numpy as np
from msgspec import Meta, Struct

from titanlite.data.mixtures.turns import Segment, Weights
from titanlite.data.state_checks import Positive, Whole, checked, refusal

Share: TypeAlias = Annotated[float, Meta(ge=0, le=sys.float_info.max)]


class _Mixture(Struct):
    slots: Positive
    names: list[str]
    #: The phases, first sequence and shares each, and the lengths of the sources.
    plan: tuple[list[tuple[Whole, list[Share]]], list[Whole | None]]
    #: Start, shares, and turns of each slot.
    segments: list[tuple[Whole, list[Share], list[list[Whole]]]]
    sources: dict[str, dict[str, Any]] = {}


def check_mixture(state: dict[str, Any]) -> None:
    """Check a mixture's state, without those of its sources. Raises StateError."""
    found = checked(state, _Mixture, "rows")
    if state.get("seeds"):
        # A version before this one wrote them for sources whose names were whole URLs.
        raise refusal("seeds", [*state["seeds"]], "an order of sources that is read no more")
    names = found.names
    if len(set(names)) < len(names):
        raise refusal("names", names, "no list of different names")
    for name, source in found.sources.items():
        lanes = source.get("lanes", found.slots)
        if lanes != found.slots:
            raise refusal(f"sources.{name}.lanes", lanes, f"not the number of slots, {found.slots}")
    phases, totals = found.plan
    firsts = [start for start, _ in phases]
    starts = [start for start, _, _ in found.segments]
    per_source: list[Sequence[Any]] = [totals]
    per_source += [shares for _, shares in phases]
    slots = [found.slots]
    for _, shares, turns in found.segments:
        per_source += [shares, *turns]
        slots.append(len(turns))
    if any(len(values) != len(names) for values in per_source):
        raise refusal("names", names, "not as long as the shares, lengths and turns of the sources")
    if firsts[:1] != [0] or starts[:1] != [0] or starts != sorted(starts) or len({*slots}) > 1:
        raise refusal("segments", starts, "no order of segments that begins with sequence 0")


def read_state(
    state: Mapping[str, Any], names: Sequence[str]
) -> tuple[dict[int, Weights], list[Segment]]:
    """Return the shares by first sequence, and the segments, of a checked state.

    Sources that the state does not have get 0.
    """
    number_of = {name: number for number, name in enumerate(state["names"])}

    def of_ours(values: Sequence[Any]) -> tuple[Any, ...]:
        return tuple(values[number_of[name]] if name in number_of else 0 for name in names)

    segments: list[Segment] = []
    for start, weights, base in state["segments"]:
        turns = np.array([of_ours(given) for given in base], dtype=np.int64)
        segments.append(Segment(start, of_ours(weights), turns))
    return {start: of_ours(weights) for start, weights in state["plan"][0]}, segments
