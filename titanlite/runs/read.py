"""Reads the folder of a run: its state, figures and config. Also folders with only a
metrics.jsonl.
"""

from __future__ import annotations

import math
import os
import re
import socket
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from titanlite import exit_codes
from titanlite.runs import ATTEMPTS
from titanlite.runs.attempts import Attempt, read_attempts
from titanlite.runs.lock import FILE as LOCK
from titanlite.runs.lock import (
    LEASE_SECONDS,
    RELEASED,
    modified_at,
    process_is_alive,
    read_lock,
)
from titanlite.runs.metrics_jsonl import FILE as METRICS
from titanlite.runs.prediction import Prediction
from titanlite.runs.read_jsonl import read_metrics

#: Levels of folders that `find_runs` searches.
DEPTH = 4

_NO_RUNS_INSIDE = re.compile(
    r"\..*|checkpoint|logs|tb|profile_traces|memory_snapshot|step-\d+|__pycache__"
)
_FIGURES = (
    "step",
    "time",
    "loss",
    "tps",
    "mfu",
    "memory_gib",
    "reserved_gib",
    "seconds_per_step",
    "data_seconds",
    "tokens_seen",
    "validation_loss",
    "grad_norm",
    "lr",
)
#: Figures of tasks begin so.
TASKS = "eval/"

Row = Mapping[str, float]


class RunError(ValueError):
    """A folder is no run, or a part of it is unreadable; the text names file and remedy."""

    exit_code = exit_codes.CONFIG


@dataclass(frozen=True)
class Run:
    """One run with all its attempts.

    `rows` have a step each, in the order of the file; values may be NaN or infinite.
    """

    folder: Path
    attempts: tuple[Attempt, ...] = ()
    rows: tuple[Row, ...] = ()
    #: The last renewal of the run's lock, in seconds since 1970; None for a run that is not alive.
    alive: float | None = None
    #: Errors in parts that could not be read.
    problems: tuple[str, ...] = ()

    @property
    def state(self) -> str:
        """running, done, stopped (by the guard), preempted, failed, died, or unknown (no
        record).
        """
        if not self.attempts:
            return "unknown"
        return str(self.attempts[-1].get("state") or ("died" if self.alive is None else "running"))

    @property
    def reason(self) -> str:
        return str(self.attempts[-1].get("reason", "")) if self.attempts else ""

    @property
    def predicted(self) -> Prediction:
        """The prediction of the newest attempt; {}: none."""
        return self.attempts[-1].get("predicted", {}) if self.attempts else {}

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
            for name in ("first_step", "step"):
                if isinstance(attempt.get(name), int):
                    known.append(attempt[name])
        return int(max(known)) if known else None

    @property
    def steps(self) -> int | None:
        steps = self.attempts[-1].get("steps") if self.attempts else None
        return steps if isinstance(steps, int) else None

    @property
    def started(self) -> float | None:
        """Seconds since 1970."""
        times = [attempt["started"] for attempt in self.attempts] or self._times
        return times[0] if times else None

    @property
    def duration(self) -> float | None:
        """Seconds of all attempts, without the pauses between them."""
        return sum(self.durations) if self.durations else None

    @property
    def durations(self) -> list[float]:
        """Seconds of each attempt; of one without a recorded end until its last row, or now."""
        starts = [attempt["started"] or 0.0 for attempt in self.attempts] or self._times[:1]
        found = []
        for place, start in enumerate(starts):
            attempt = self.attempts[place] if self.attempts else {}
            following = self.attempts[place + 1] if place + 1 < len(starts) else {}
            # Its rows may be in an earlier file, if the next attempt began again.
            ended = attempt.get("ended") or following.get("lost", {}).get("seen")
            next_start = starts[place + 1] if following else math.inf
            found.append(max((ended or self._last_sign(start, next_start)) - start, 0.0))
        return found

    @property
    def ended(self) -> float | None:
        """When the last attempt ended, or last showed that it lived, in seconds since 1970."""
        if not self.attempts:
            return None
        last = self.attempts[-1]
        return last.get("ended") or self._last_sign(last["started"] or 0.0, math.inf)

    def _last_sign(self, start: float, end: float) -> float:
        seen = [start, *(time for time in self._times if start <= time < end)]
        if end == math.inf:
            seen.append(self.alive or start)
        return max(seen)

    @property
    def _times(self) -> list[float]:
        return [row["time"] for row in self.rows if "time" in row]


def read_run(folder: Path) -> Run:
    """Read the run in a folder. Raises RunError for what is no run.

    Damaged lines are named in `problems`.
    """
    folder = Path(folder)
    problems: list[str] = []
    if not any((folder / name).exists() for name in (ATTEMPTS, METRICS)):
        raise RunError(
            f"{folder}: not a run: it has neither {ATTEMPTS} nor {METRICS}; "
            f"`titanlite runs {folder}` lists the runs below it"
        )
    attempts = _attempts_of_last_run(folder, problems)
    rows: tuple[Row, ...] = ()
    with suppress(FileNotFoundError):
        rows = _rows(folder / METRICS, problems)
    alive = last_sign_of_life(folder)
    if attempts and not (folder / LOCK).exists() and _trains_here(attempts[-1]):
        # A loop of somebody's own took no lock.
        alive = modified_at(folder / ATTEMPTS)
    return Run(folder, attempts, rows, alive, tuple(problems))


def _trains_here(attempt: Attempt) -> bool:
    """Return whether the process of an attempt runs on this machine."""
    number = attempt.get("pid")
    is_here = attempt.get("host") == socket.gethostname()
    return is_here and isinstance(number, int) and Path(f"/proc/{number}/stat").exists()


def last_sign_of_life(folder: Path) -> float | None:
    """Return when the live run in a folder last renewed its lock, in seconds since 1970, or None.

    A lock from elsewhere is judged by the clocks of both machines: this function writes nothing.
    """
    with suppress(OSError):
        holder = read_lock(folder / LOCK)
        renewed = modified_at(folder / LOCK)
        if holder is None or renewed is None or holder.get(RELEASED):
            return None
        alive = process_is_alive(holder)
        if alive is None:
            alive = time.time() - renewed <= LEASE_SECONDS
        return renewed if alive else None
    return None


def _attempts_of_last_run(folder: Path, problems: list[str]) -> tuple[Attempt, ...]:
    """Return the attempts since the last one that began a run.

    A new run in an earlier one's folder has its own metrics, and may begin at a step of another
    run.
    """
    attempts = read_attempts(folder, problems)
    begin = 0
    for place, attempt in enumerate(attempts):
        begins = attempt.get("first_step") == 0 or str(attempt.get("began")).startswith("from ")
        before = attempts[place - 1] if place else {"state": "done"}
        # Or it repeats one that has left no checkpoint.
        is_same = attempt.get("began") == "fresh" and not attempt.get("config_changes")
        kept = before.get("saved_step") or before.get("first_step")
        if begins and not (is_same and not kept and before.get("state") != "done"):
            begin = place
    return tuple(attempts[begin:])


def find_runs(folder: Path, depth: int = DEPTH) -> list[Path]:
    """Return the run folders at most `depth` levels below `folder`, itself included.

    Folders that runs make for other things are skipped. Raises RunError when there is no such
    folder.
    """
    if not folder.is_dir():
        raise RunError(
            f"{folder}: there is no such folder; runs are written to job.dump_folder, name it or "
            "a folder above it"
        )
    found: list[Path] = []
    seen: set[str] = set()
    for path, folders, files in os.walk(folder, followlinks=True):
        # Symbolic links may form circles.
        real = os.path.realpath(path)
        if real in seen:
            folders.clear()
            continue
        seen.add(real)
        if {ATTEMPTS, METRICS} & {*files}:
            found.append(Path(path))
        if len(Path(path).relative_to(folder).parts) >= depth:
            folders.clear()
        else:
            folders[:] = sorted(name for name in folders if not _NO_RUNS_INSIDE.fullmatch(name))
    return found


def _rows(path: Path, problems: list[str]) -> tuple[Row, ...]:
    """Training rows get "total_tps", tokens per second over all devices. Raises FileNotFoundError.

    Texts stand for numbers that are not finite. What is no number, and rows without a step, are
    left out.
    """
    rows: list[dict[str, float]] = []
    step = 0.0
    tokens = 0.0
    for raw in read_metrics(path, problems):
        row: dict[str, float] = {}
        for name, value in raw.items():
            if name in _FIGURES or name.startswith(TASKS):
                with suppress(TypeError, ValueError, OverflowError):
                    row[name] = float(value)
        if not math.isfinite(row.get("step", math.inf)):
            continue
        if {"loss", "tokens_seen", "seconds_per_step"} <= row.keys():
            steps = row["step"] - step
            seconds = row["seconds_per_step"]
            if steps > 0 and seconds > 0:
                row["total_tps"] = (row["tokens_seen"] - tokens) / steps / seconds
            step = row["step"]
            tokens = row["tokens_seen"]
        rows.append(row)
    return tuple(rows)
