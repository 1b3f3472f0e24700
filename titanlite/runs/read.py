"""A run's folder read back: its state, its numbers, its config. Also folders that have only a metrics.jsonl."""

from __future__ import annotations

import os
import re
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from titanlite.config.toml import TOMLDecodeError, loads
from titanlite.observe.metrics import FILE as METRICS
from titanlite.observe.metrics import read_metrics
from titanlite.runs.attempts import FILE, RunError, read_attempts, seconds, state_of
from titanlite.runs.folder import CONFIG

#: Folders deep that `find_runs` looks.
DEPTH = 4

_NO_RUNS_INSIDE = re.compile(r"\..*|checkpoint|logs|tb|profile_traces|memory_snapshot|step-\d+|__pycache__")
_FIGURES = (
    *("step", "time", "loss", "tps", "mfu", "memory_gib", "reserved_gib", "seconds_per_step", "tokens_seen"),
    "validation_loss",
)

Row = Mapping[str, float]


@dataclass(frozen=True)
class Run:
    """One run, all its attempts.

    `rows` have a step each, in the order of the file; values that were not finite are NaN or infinities.
    """

    folder: Path
    attempts: tuple[Mapping[str, Any], ...] = ()
    rows: tuple[Row, ...] = ()
    #: The resolved config by `section.key`; None where the folder has none.
    config: Mapping[str, Any] | None = None
    #: What could not be read.
    problems: tuple[str, ...] = field(default=())

    @property
    def state(self) -> str:
        """running, done, stopped (by the guard), preempted, failed, died, or unknown (no run.json)."""
        return state_of(self.attempts[-1]) if self.attempts else "unknown"

    @property
    def reason(self) -> str:
        return str(self.attempts[-1].get("reason", "")) if self.attempts else ""

    @property
    def training(self) -> list[Row]:
        return [row for row in self.rows if "loss" in row]

    @property
    def validations(self) -> list[Row]:
        return [row for row in self.rows if "validation_loss" in row]

    @property
    def step(self) -> int | None:
        """Steps done, as far as is known."""
        known = [row["step"] for row in self.rows[-1:]]
        for attempt in self.attempts[-1:]:
            known += [attempt[name] for name in ("first_step", "step") if isinstance(attempt.get(name), int)]
        return int(max(known)) if known else None

    @property
    def steps(self) -> int | None:
        """Steps it was to do."""
        steps = self.attempts[-1].get("steps") if self.attempts else None
        return steps if isinstance(steps, int) else None

    @property
    def started(self) -> float | None:
        """Seconds since 1970."""
        times = [seconds(a.get("started")) for a in self.attempts[:1]] or [row["time"] for row in self._timed[:1]]
        return times[0] if times else None

    @property
    def duration(self) -> float | None:
        """Seconds that its attempts ran, pauses between them left out."""
        if not self.attempts:
            timed = self._timed
            return timed[-1]["time"] - timed[0]["time"] if timed else None
        spans = [(seconds(a.get("started")), seconds(a.get("ended") or a.get("heartbeat"))) for a in self.attempts]
        total = sum(max(end - start, 0.0) for start, end in spans if start is not None and end is not None)
        # The newest row may be younger than the last sign of life.
        last_seen, rows = spans[-1][1], self._timed
        if not self.attempts[-1].get("ended") and last_seen is not None and rows:
            total += max(rows[-1]["time"] - last_seen, 0.0)
        return total

    @property
    def _timed(self) -> list[Row]:
        return [row for row in self.rows if "time" in row]

    def segments(self) -> list[list[Row]]:
        """The training rows by attempt; one list where nothing tells them apart."""
        starts = [start for a in self.attempts[1:] if (start := seconds(a.get("started"))) is not None]
        parts: list[list[Row]] = [[] for _ in range(len(starts) + 1)]
        for row in self.training:
            parts[bisect_right(starts, row["time"]) if "time" in row else -1].append(row)
        return [part for part in parts if part]


def read_run(path: Path) -> Run:
    """The run in a folder, or that of a metrics file. Raises RunError when it is none or cannot be read."""
    path = Path(path)
    if path.is_file() and path.name != FILE:
        return _of_metrics(path)
    folder = path.parent if path.is_file() else path
    if not folder.is_dir():
        raise RunError(f"{path}: there is no such folder; `titanlite runs FOLDER` lists the runs below a folder")
    metrics = folder / METRICS
    if not (folder / FILE).exists() and not metrics.exists():
        raise RunError(
            f"{folder}: not a run: it has neither {FILE} nor {METRICS}; "
            f"`titanlite runs {folder}` lists the runs below it"
        )
    try:
        attempts = read_attempts(folder / FILE)
    except FileNotFoundError:
        attempts = []
    # A run that began anew in the folder of an earlier one has its own metrics, so also its own attempts.
    begins = [i for i, attempt in enumerate(attempts) if attempt.get("first_step") == 0]
    return Run(folder, tuple(attempts[begins[-1] if begins else 0 :]), _rows(metrics), _config(folder / CONFIG))


def glance(path: Path) -> Run:
    """`read_run` for a list: what cannot be read is left out and named in `problems`."""
    try:
        return read_run(path)
    except (RunError, OSError) as error:
        problems = [str(error)]
    try:
        attempts = tuple(read_attempts(path / FILE))
    except (RunError, OSError):
        attempts = ()
    try:
        rows = _rows(path / METRICS)
    except (RunError, OSError):
        rows = ()
    return Run(path, attempts, rows, problems=tuple(problems))


def find_runs(folder: Path, depth: int = DEPTH) -> list[Path]:
    """Folders with a run.json or metrics.jsonl at most `depth` levels below `folder`, itself included.

    Folders that runs make for other things are not entered. Raises RunError when there is no such folder.
    """
    if not folder.is_dir():
        raise RunError(
            f"{folder}: there is no such folder; runs are written to job.dump_folder, name it or a folder above it"
        )
    return list(_walk(folder, depth, set()))


def _walk(folder: Path, depth: int, seen: set[str]) -> Iterator[Path]:
    real = os.path.realpath(folder)
    if real in seen:  # symbolic links may lead in circles
        return
    seen.add(real)
    try:
        entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
    except OSError:
        return
    if {FILE, METRICS} & {entry.name for entry in entries}:
        yield folder
    if depth:
        for entry in entries:
            if entry.is_dir() and not _NO_RUNS_INSIDE.fullmatch(entry.name):
                yield from _walk(folder / entry.name, depth - 1, seen)


def _of_metrics(path: Path) -> Run:
    """An earlier run's metrics-N.jsonl; nothing else in the folder is surely of that run."""
    if path.name == METRICS:
        return read_run(path.parent)
    if path.suffix != ".jsonl":
        raise RunError(f"{path}: not a run; give its folder, or a metrics file (.jsonl)")
    return Run(path, rows=_rows(path))


def _rows(path: Path) -> tuple[Row, ...]:
    try:
        raw = read_metrics(path)
    except FileNotFoundError:
        return ()
    except ValueError as error:
        raise RunError(str(error)) from None
    return tuple(_with_total(_figures(path, row) for row in raw if "step" in row))


def _figures(path: Path, row: Mapping[str, Any]) -> dict[str, float]:
    """What of a row can be compared, as numbers."""
    found = {}
    for name in _FIGURES:
        if name not in row:
            continue
        try:
            if isinstance(row[name], bool):
                raise TypeError
            found[name] = float(row[name])
        except (TypeError, ValueError):
            raise RunError(
                f"{path}: row of step {row['step']!r}: {name} is {row[name]!r}, not a number; mend or delete the row"
            ) from None
    return found


def _with_total(rows: Iterator[dict[str, float]]) -> Iterator[Row]:
    """Adds "total_tps", tokens per second over all devices, to training rows."""
    before, tokens_before = 0.0, 0.0
    for row in rows:
        if {"loss", "tokens_seen", "seconds_per_step"} <= row.keys():
            done = row["step"] - before
            if done > 0 and row["seconds_per_step"] > 0:
                row["total_tps"] = (row["tokens_seen"] - tokens_before) / done / row["seconds_per_step"]
            before, tokens_before = row["step"], row["tokens_seen"]
        yield row


def _config(path: Path) -> dict[str, Any] | None:
    try:
        return dict(flat(loads(path.read_text(encoding="utf-8"))))
    except FileNotFoundError:
        return None
    except (TOMLDecodeError, UnicodeDecodeError) as error:
        raise RunError(f"{path}: not TOML ({error}); mend it, or rename it to compare without it") from None


def flat(table: Mapping[str, Any], lead: Sequence[str] = ()) -> Iterator[tuple[str, Any]]:
    """The values of nested tables by dotted name."""
    for name, value in table.items():
        if isinstance(value, dict):
            yield from flat(value, (*lead, name))
        else:
            yield ".".join((*lead, name)), value
