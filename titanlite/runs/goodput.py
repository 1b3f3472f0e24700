"""The goodput of a run: the share of its time that went into steps which it kept."""

from __future__ import annotations

import math

from titanlite.runs.read import Run


def goodput_of(run: Run) -> float | None:
    """Return the share of useful time, from the first launch to the last end; None: unknown.

    Waits for data, saves, validation, restarts and steps trained again are not useful.
    """
    if not run.attempts or run.ended is None:
        return None
    first = run.attempts[0]
    launched = first.get("launched") or first.get("started")
    if launched is None or run.ended <= launched:
        return None
    kept: list[tuple[int, float]] = []
    for row in run.training:
        step = int(row["step"])
        while kept and kept[-1][0] >= step:
            kept.pop()
        before = kept[-1][0] if kept else int(first.get("first_step") or 0)
        seconds = row.get("seconds_per_step", 0.0) - row.get("data_seconds", 0.0)
        if math.isfinite(seconds):
            kept.append((step, (step - before) * seconds))
    return math.fsum(seconds for _, seconds in kept) / (run.ended - launched)
