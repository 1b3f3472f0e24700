"""Folders of runs, as the trainer leaves them, without training."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from titanlite.runs import ATTEMPTS, attempts
from titanlite.runs.record import AttemptRecord

Start = Callable[..., AttemptRecord]


def change_start(folder: Path, number: int, **values: Any) -> None:
    """Change the recorded start of an attempt; `ended` is the time of its end."""
    entries = attempts.read_entries(folder)
    for entry in entries:
        if entry["attempt"] == number and entry["event"] == "start":
            entry.update({name: value for name, value in values.items() if name != "ended"})
        elif entry["attempt"] == number and "ended" in values:
            entry["time"] = values["ended"]
    written(folder, *entries)


def training_row(
    step: int, loss: float | str, tps: float = 100.0, time: float = 0.0, **more: Any
) -> dict[str, Any]:
    """A row as two ranks write it: 1,000 tokens a step over both of them."""
    return {
        "step": step,
        "time": time or 1_000_000.0 + step,
        "loss": loss,
        "tps": tps,
        "seconds_per_step": 500 / tps,
        "tokens_seen": 1000 * step,
        "memory_gib": 1.5,
        **more,
    }


def write_metrics(
    folder: Path, rows: Sequence[Mapping[str, Any]], name: str = "metrics.jsonl"
) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


#: 2026-01-02, 3 o'clock, in seconds since 1970.
EPOCH = 1767322800.0


def at(second: float) -> str:
    """Return a time at so many seconds of an hour, as a record has it."""
    minutes, seconds = divmod(second, 60)
    return f"2026-01-02T03:{int(minutes):02}:{seconds:06.3f}+00:00"


def begin(number: int, launched: float | None, time: float, step: int = 0, **more: Any) -> Any:
    """Return the line of a start, at seconds of an hour."""
    entry = {"event": "start", "attempt": number, "time": at(time), "step": step, "steps": 100}
    began = {"began": f"resumed from step {step}" if step else "fresh", "ranks": 16}
    if launched is not None:
        entry["launched"] = EPOCH + launched
    return {**entry, **began, **more}


def end(number: int, time: float, step: int, state: str = "done", **more: Any) -> Any:
    """Return the line of an end."""
    code = {"done": 0, "preempted": 5, "failed": 7}[state]
    entry = {"event": "end", "attempt": number, "time": at(time), "state": state, "step": step}
    return {**entry, "exit_code": code, **more}


def written(folder: Path, *entries: Any) -> Path:
    """Write a record of these lines."""
    return write_metrics(folder, entries, ATTEMPTS)


def strict_lines(file: Path) -> list[dict[str, Any]]:
    """Return the JSON objects of a file that holds nothing else."""
    return [json.loads(line) for line in file.read_text().splitlines()]
