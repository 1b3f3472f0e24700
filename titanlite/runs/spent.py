"""The times of an attempt as its rows of metrics.jsonl have them; of a killed one nothing else has.

The kinds are those of `titanlite.metrics.throughput`: "first_step" and "work" of steps, "data" (the
waits of rank 0), and pauses by the name of their phase.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple, TypeGuard

#: Figure of a row → kind of the pause that it measures, in seconds.
_PAUSES = {
    "save_seconds": "save",
    "validation_seconds": "validate",
    "eval_seconds": "evaluate",
}


class Spent(NamedTuple):
    """What an attempt did up to its last row."""

    #: Time of that row, in seconds since 1970; None: it has none.
    seen: float | None
    #: Steps.
    trained: int
    #: By kind.
    seconds: dict[str, float]


def is_time(value: object) -> TypeGuard[float]:
    """Return whether a value is a number of seconds: finite, and not negative."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        return False
    return math.isfinite(value) and 0 <= value < 2**63


def spent_in(rows: Iterable[Mapping[str, Any]], began: float, step: int) -> Spent:
    """Return the times of an attempt that began at a time (seconds since 1970) and after a step.

    rows: of metrics.jsonl, in their order; those of earlier attempts are passed over.
    """
    seconds: dict[str, float] = defaultdict(float)
    seen = None
    first = step
    for row in rows:
        if not is_time(row.get("time")) or row["time"] < began:
            continue
        seen = row["time"]
        for figure, kind in _PAUSES.items():
            if is_time(row.get(figure)):
                seconds[kind] += row[figure]
        steps = _steps_since(row, step)
        if steps:
            data = row["data_seconds"] * steps if is_time(row.get("data_seconds")) else 0.0
            kind = "first_step" if step == first else "work"
            seconds[kind] += max(row["seconds_per_step"] * steps - data, 0.0)
            seconds["data"] += data
            step += steps
    return Spent(seen, step - first, {kind: round(value, 3) for kind, value in seconds.items()})


def _steps_since(row: Mapping[str, Any], step: int) -> int:
    """Return the steps that a row's means are of; 0: it is no row of training."""
    if not (is_time(row.get("step")) and is_time(row.get("seconds_per_step"))):
        return 0
    return max(int(row["step"]) - step, 0)


def misfit(entry: Mapping[str, Any]) -> str:
    """Return what is wrong with the times in a line of attempts.jsonl; "" for what this program
    may have written.
    """
    launched = entry.get("launched")
    if launched is not None and not is_time(launched):
        return f"launched is {launched!r:.40}"
    killed = entry.get("killed")
    if killed is not None:
        seen = killed.get("seen")
        trained = killed.get("trained")
        if not isinstance(killed.get("seconds"), dict):
            return "killed has no table of seconds"
        if not isinstance(trained, int) or not is_time(trained):
            return f"killed has trained {trained!r:.40}"
        if seen is not None and not is_time(seen):
            return f"killed has seen {seen!r:.40}"
    tables = {name: entry.get(name) or {} for name in ("seconds", "saves")}
    tables["killed"] = {} if killed is None else killed["seconds"]
    for name, table in tables.items():
        if not all(map(is_time, table.values())):
            return f"{name} has an entry that is no time"
    return ""
