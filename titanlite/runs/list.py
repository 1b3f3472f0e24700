"""`titanlite runs`: the runs below some folders, and how each is doing."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from titanlite.metrics.jsonl import json_value
from titanlite.runs.read import Run, find_runs, glance
from titanlite.utils import Table, human_time, render

NONE = "–"
_STATE_WORDS = {"stopped": "stopped by guard"}


def list_runs(folders: Iterable[Path]) -> list[Run]:
    """Every run below the folders, the newest first. Raises RunError when a folder is not there."""
    paths = dict.fromkeys(path for folder in folders for path in find_runs(folder))
    return sorted(map(glance, paths), key=lambda run: (-(run.started or 0), str(run.folder)))


def runs_text(runs: Sequence[Run], terminal: bool) -> str:
    """A table, and below it what needs words: why runs stopped, what could not be read."""
    rows = [_cells(run) for run in runs]
    columns = ("run", "state", "step", "loss", "validation", "tokens/s", "started", "duration")
    notes = [f"{run.folder}: {state_words(run)}: {run.reason}" for run in runs if run.reason]
    notes += [problem for run in runs for problem in run.problems]
    return "\n".join([render(Table(columns, rows, left=(0, 1)), terminal), *(f"note: {note}" for note in notes)])


def state_words(run: Run) -> str:
    return _STATE_WORDS.get(run.state, run.state)


def runs_json(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """One object per run; what is not known is null, numbers that are not finite are strings as in metrics.jsonl."""
    return [
        {
            "run": str(run.folder),
            "state": run.state,
            "reason": run.reason or None,
            "step": run.step,
            "steps": run.steps,
            "loss": json_value(last(run, "loss")),
            "validation_loss": json_value(last(run, "validation_loss")),
            "tokens_per_second": json_value(last(run, "total_tps")),
            "tokens_per_second_per_device": json_value(last(run, "tps")),
            "started": run.started,
            "duration": run.duration,
            "attempts": len(run.attempts),
            "problems": list(run.problems),
        }
        for run in runs
    ]


def last(run: Run, name: str) -> float | None:
    """The newest value of a figure."""
    return next((row[name] for row in reversed(run.rows) if name in row), None)


def number(value: float | None, form: str) -> str:
    return NONE if value is None else format(value, form)


def _cells(run: Run) -> list[str]:
    started = NONE if run.started is None else f"{datetime.fromtimestamp(run.started):%Y-%m-%d %H:%M}"
    step = number(run.step, ",")
    return [
        str(run.folder),
        state_words(run),
        step if run.steps is None else f"{step} of {run.steps:,}",
        number(last(run, "loss"), ".4f"),
        number(last(run, "validation_loss"), ".4f"),
        number(last(run, "total_tps"), ",.0f"),
        started,
        NONE if run.duration is None else human_time(run.duration),
    ]
