"""`titanlite runs`: the runs below some folders, with their states and newest figures."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from titanlite.cli.argument_parser import Commands, new_command
from titanlite.cli.run_figures import (
    NONE,
    compare_run,
    last,
    number,
    state_words,
    table,
    to_json,
)
from titanlite.config.errors import bad_flag
from titanlite.runs import ATTEMPTS
from titanlite.runs.attempts import read_attempts
from titanlite.runs.goodput import goodput_of
from titanlite.runs.read import TASKS, Run, find_runs, read_run
from titanlite.runs.text_tables import Table, render
from titanlite.utils import escape_name


def add_command(commands: Commands) -> None:
    """Add `runs` to argparse."""
    runs = new_command(
        commands,
        _run,
        "runs",
        "list runs and how they are doing",
        "List the runs below some folders, the newest first: state, step, losses, "
        "speed. "
        "A run without an end that shows no sign of life has died.",
    )
    runs.add(
        "folders",
        "folder below which runs are looked for (default: ./outputs)",
        "FOLDER",
        nargs="*",
        type=Path,
    )
    runs.add("--json", "print a JSON list, one object per run")
    runs.add("--attempts", "show each run's attempts: how each began and ended")


def _run(arguments: argparse.Namespace) -> str:
    if arguments.json and arguments.attempts:
        raise bad_flag("--json", "is for the list of runs", f"{ATTEMPTS} in a run's folder is JSON")
    folders = arguments.folders or [Path("outputs")]
    found = list_runs(folders)
    if arguments.attempts:
        tables = (attempts_text(run) for run in found)
        return "\n\n".join(filter(None, tables)) or "no attempts were recorded"
    if arguments.json:
        return to_json([_as_json(run) for run in found])
    if not found:
        return escape_name(f"no runs below {', '.join(map(str, folders))}")
    return runs_text(found)


def list_runs(folders: Iterable[Path]) -> list[Run]:
    """Return every run below the folders, the newest first. Raises RunError for a missing
    folder.
    """
    paths = dict.fromkeys(path for folder in folders for path in find_runs(folder))
    runs = (read_run(path) for path in paths)
    return sorted(runs, key=lambda run: (-(run.started or 0), str(run.folder)))


def runs_text(runs: Sequence[Run]) -> str:
    """Return a table, the reasons of stops, unreadable parts, and predictions."""
    notes = [f"{run.folder}: {state_words(run)}: {run.reason}" for run in runs if run.reason]
    notes += [problem for run in runs for problem in run.problems]
    notes += [
        f"{run.folder}: {one.text(name)}" for run in runs for name, one in compare_run(run).items()
    ]
    return "\n".join([render(table(runs)), *(f"note: {escape_name(note)}" for note in notes)])


def _as_json(run: Run) -> dict[str, Any]:
    """Unknown values are null."""
    return {
        "run": str(run.folder),
        "state": run.state,
        "reason": run.reason or None,
        "step": run.step,
        "steps": run.steps,
        "loss": last(run, "loss"),
        "validation_loss": last(run, "validation_loss"),
        "tasks": {
            name.removeprefix(TASKS): value
            for row in run.rows
            for name, value in row.items()
            if name.startswith(TASKS)
        },
        "tokens_per_second": last(run, "total_tps"),
        "tokens_per_second_per_device": last(run, "tps"),
        "predicted": run.predicted or None,
        "compared": {name: one._asdict() for name, one in compare_run(run).items()},
        "started": run.started,
        "duration": run.duration,
        "attempts": len(run.attempts),
        "goodput": goodput_of(run),
        "problems": list(run.problems),
    }


def attempts_text(run: Run) -> str:
    """Return the attempts of a run as a table; "" where none is recorded."""
    notes: list[str] = []
    rows = []
    attempts = read_attempts(run.folder, notes)
    for one in attempts:
        state = one.get("state", "died")
        # Without an end its step is that of its start.
        end = one if "state" in one else {}
        if one is attempts[-1] and not end:
            state = run.state
            end = {"step": run.step}
        figures = [end.get(name) for name in ("exit_code", "step", "saved_step", "lost_tokens")]
        words = [
            str(one["attempt"]),
            _time(one.get("started")),
            one.get("began", NONE),
            _time(one.get("ended")),
            state,
        ]
        rows.append([*words, *(number(figure, ",") for figure in figures)])
        changes = [f"{key}: {change}" for key, change in one.get("config_changes", {}).items()]
        if lost := one.get("lost"):
            changes.append(f"attempt {lost['attempt']} lost {lost['tokens']:,} tokens")
        told = filter(None, (one.get("reason"), *changes))
        notes += [f"attempt {one['attempt']}: {text}" for text in told]
    columns = ("attempt", "started", "began", "ended", "state", "exit", "step", "saved", "lost")
    shown = [render(Table(columns, rows, left=range(1, 5), title=str(run.folder)))] if rows else []
    return "\n".join([*shown, *(f"note: {escape_name(note)}" for note in notes)])


def _time(seconds: float | None) -> str:
    return NONE if seconds is None else f"{datetime.fromtimestamp(seconds):%Y-%m-%d %H:%M:%S}"
