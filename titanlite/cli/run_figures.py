"""Figures of runs as cells of a table, and values as JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import datetime
from typing import Any

from titanlite.runs.goodput import goodput_of
from titanlite.runs.prediction import Compared, compare
from titanlite.runs.read import Run
from titanlite.runs.text_tables import Table
from titanlite.utils import human_time

NONE = "–"


def table(runs: Sequence[Run]) -> Table:
    """Return a row for each run."""
    columns = (
        "run",
        "state",
        "step",
        "loss",
        "validation",
        "tokens/s",
        "started",
        "duration",
        "goodput",
    )
    rows = []
    for run in runs:
        step = number(run.step, ",")
        started = NONE
        if run.started is not None:
            started = f"{datetime.fromtimestamp(run.started):%Y-%m-%d %H:%M}"
        cells = [
            str(run.folder),
            state_words(run),
            step if run.steps is None else f"{step} of {run.steps:,}",
            number(last(run, "loss"), ".4f"),
            number(last(run, "validation_loss"), ".4f"),
            number(last(run, "total_tps"), ",.0f"),
            started,
            NONE if run.duration is None else human_time(run.duration),
            number(goodput_of(run), ".1%"),
        ]
        rows.append(cells)
    return Table(columns, rows, left=(0, 1))


def compare_run(run: Run) -> dict[str, Compared]:
    """Return its newest figures beside those predicted. Memory is the peak of all rows."""
    found: dict[str, Compared] = {}
    for row in run.training[-1:]:
        peak = max(one.get("memory_gib", 0.0) for one in run.training)
        figures = {**row, "memory_gib": peak}
        if row.get("seconds_per_step") and run.steps and run.steps > row["step"]:
            figures["hours_left"] = (run.steps - row["step"]) * row["seconds_per_step"] / 3600
        found = compare(run.predicted, figures, 0)
    for row in run.validations[-1:]:
        found |= compare(run.predicted, row, int(row["step"]))
    return found


def state_words(run: Run) -> str:
    """Return the state of a run as a table shows it."""
    return "stopped by guard" if run.state == "stopped" else run.state


def last(run: Run, name: str) -> float | None:
    """Return the newest value of a figure."""
    return next((row[name] for row in reversed(run.rows) if name in row), None)


def number(value: float | None, form: str) -> str:
    """Return a figure in this form; a sign for none where it is None."""
    return NONE if value is None else format(value, form)


def to_json(value: Any) -> str:
    """Return JSON, with numbers that are not finite and a config's dates as strings."""
    plain = json.loads(json.dumps(value, default=str), parse_constant=lambda name: str(float(name)))
    return json.dumps(plain, indent=1)
