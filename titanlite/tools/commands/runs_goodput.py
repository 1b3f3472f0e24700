"""Where the time of runs went: `titanlite runs --goodput`, and the same in its JSON."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from titanlite.plan.hardware import DEFAULT_GPUS_PER_NODE
from titanlite.runs.goodput import PARTS, Goodput, goodput_of
from titanlite.runs.mtbf import Observed, nodes_by, observed
from titanlite.runs.read import Run
from titanlite.utils import Table, counted, escape_name, human_time, render

NONE = "–"
_COLUMNS = [part for part in PARTS if part != "steps"]


def goodput_json(run: Run) -> dict[str, Any] | None:
    """Return where the time of a run went, and how often its nodes failed; None: no attempt is
    recorded.
    """
    found = goodput_of(run)
    if found is None:
        return None
    seen = observed(run, nodes_by(DEFAULT_GPUS_PER_NODE))
    return {**found.as_json(), "mtbf": _mtbf(seen)}


def _mtbf(seen: Observed) -> dict[str, Any]:
    """Unknown values are null."""
    limits = None
    if seen.node_seconds:
        limits = [seen.least / 3600, seen.most / 3600 if seen.failures else None]
    return {
        "failures": seen.failures,
        "node_hours": seen.node_seconds / 3600,
        "hours": seen.mtbf and seen.mtbf / 3600,
        "hours_range": limits,
    }


def goodput_text(runs: Sequence[Run]) -> str:
    """Return a table with the share of each part of the time, and below it how often runs failed.

    The goodput is the share of the part "steps".
    """
    rows = []
    notes = []
    for run in runs:
        rows.append([str(run.folder), *_cells(goodput_of(run))])
        seen = observed(run, nodes_by(DEFAULT_GPUS_PER_NODE))
        if seen.mtbf is not None:
            failures = counted(seen.failures, "failures")
            limits = f"{seen.least / 3600:,.3g} to {seen.most / 3600:,.3g} hours"
            notes.append(
                f"{run.folder}: {failures} in {seen.node_seconds / 3600:,.3g} node hours: one in "
                f"{seen.mtbf / 3600:,.3g} hours of a node (95% sure: {limits})"
            )
        notes += run.problems
    table = Table(("run", "time", "goodput", *_COLUMNS), rows)
    return "\n".join([render(table), *(f"note: {escape_name(note)}" for note in notes)])


def _cells(found: Goodput | None) -> list[str]:
    if found is None or found.wall <= 0:
        return [NONE for _ in range(len(_COLUMNS) + 2)]
    shares = [f"{found.seconds[name] / found.wall:.1%}" for name in _COLUMNS]
    return [human_time(found.wall), f"{found.share:.1%}", *shares]
