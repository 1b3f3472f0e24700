"""A step as a list of events on named tensors, and its interpreter. No torch here.

A tensor is named by its part (of `parts.PARTS`) and its owner, as ("gathered weights", group). What
exists only while something runs has no name: it is in `Run`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Mapping
from typing import NamedTuple

from titanlite.plan.parts import PARTS, Moment, RankMemory


class Alloc(NamedTuple):
    """A tensor begins to exist; its owner may have several of this size."""

    part: str
    owner: Hashable
    size: int
    on_host: bool = False


class Free(NamedTuple):
    """A tensor ends."""

    part: str
    owner: Hashable


class Run(NamedTuple):
    """Something runs, and this moment's memory counts."""

    #: The same as in `Moment`.
    phase: str
    module: str
    #: Part → bytes that exist only now.
    work: Mapping[str, int]
    #: Part → bytes that the module keeps between forward and backward.
    kept: Mapping[str, int] = {}


Event = Alloc | Free | Run


def replay(rank: int, events: Iterable[Event]) -> RankMemory:
    """Return the moments of a step, and the most host memory."""
    moments: list[Moment] = []
    host: dict[str, int] = {}
    now: dict[bool, Counter[str]] = {False: Counter(), True: Counter()}
    alive: dict[tuple[str, Hashable], list[Alloc]] = {}
    for event in events:
        if isinstance(event, Run):
            parts: dict[str, int] = {}
            for part in PARTS:
                others = now[False][part] + event.work.get(part, 0)
                if size := others + event.kept.get(part, 0):
                    parts[part] = size
            moments.append(Moment(event.phase, event.module, parts))
        elif isinstance(event, Alloc):
            alive.setdefault((event.part, event.owner), []).append(event)
            sizes = now[event.on_host]
            sizes[event.part] += event.size
            if event.on_host:
                host[event.part] = max(host.get(event.part, 0), sizes[event.part])
        else:
            ended = alive[event.part, event.owner].pop()
            now[ended.on_host][ended.part] -= ended.size
    return RankMemory(rank, tuple(moments), host)
