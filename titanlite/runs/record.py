"""attempts.jsonl: a line for each start of a run and for each end, only ever appended to.

    {"event": "start", "attempt": 2, "time": …, "began": "resumed from step 40", "after":
     "preempted", "step": 40,
     "steps": 100, "config_changes": {"optimizer.lr": "0.001 -> 0.002"}, "renamed": {"config.toml":
     "config-1.toml"},
     "config": "config.toml", "ranks": 8, "host": …, "command": […], "git": {…}, "versions": {…},
     "environment": {…}}
    {"event": "end", "attempt": 2, "time": …, "state": "preempted", "exit_code": 5, "reason":
     "SIGTERM on every rank",
     "step": 97, "saved_step": 97, "lost_steps": 0, "lost_tokens": 0}

Between them, `titanlite.checkpoint.verify_resume` adds a line with the event "resume".

A killed attempt has no end, or one without state and step, by the launcher. The next start records
its loss, and the time of its last row, under `lost`, as far as metrics.jsonl tells. Beside it lie

    config.toml   the resolved config; an earlier attempt's that differs is kept as config-N.toml
    git.diff      changes to the checkout that titanlite was run from; earlier ones as git-N.diff
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from titanlite.runs import ATTEMPTS, provenance
from titanlite.runs.symlink_checks import read_own
from titanlite.utils import (
    append_line,
    atomic_write,
    counted,
    logger,
    timestamp,
)

if TYPE_CHECKING:
    from titanlite.checkpoint.store_paths import AnyPath

CONFIG = "config.toml"
DIFF = "git.diff"

FinalState = Literal["done", "stopped", "preempted", "failed"]


@dataclass(frozen=True)
class Start:
    """First record of an attempt."""

    #: The resolved config.
    config_toml: str
    #: Number of steps of the whole run.
    steps: int
    ranks: int
    device: str
    description: str = ""
    #: Steps and tokens that are done.
    step: int = 0
    tokens: int = 0
    #: It resumes from a checkpoint of this run.
    resumed: bool = False
    #: Another run's checkpoint that it starts from.
    source: AnyPath | None = None
    #: The command with the program's name.
    argv: Sequence[str] = field(default_factory=lambda: sys.argv)

    @property
    def began(self) -> str:
        if self.resumed:
            return f"resumed from step {self.step}"
        return "fresh" if self.source is None else f"from {self.source}"


class Begun(NamedTuple):
    """An attempt that has begun."""

    record: AttemptRecord
    #: For the log: what changed, and what an attempt that was killed has lost.
    lines: list[str]


class AttemptRecord:
    """Writes the lines of an attempt. A failed write costs the lines, with one warning."""

    def __init__(self, folder: Path, number: int, step: int, tokens: int, resumed: bool) -> None:
        self.path = folder / ATTEMPTS
        self.number = number
        self._saved_step: int | None = step if resumed else None
        self._kept = step, tokens
        self._ended = False
        self._warned = False
        #: Resources that the attempt used so far; {}: not measured.
        self.energy: Callable[[], dict[str, float]] = dict

    def saved(self, step: int, tokens: int) -> None:
        self._saved_step = step
        self._kept = step, tokens

    def end(
        self, state: FinalState, step: int, tokens: int = 0, exit_code: int = 0, reason: str = ""
    ) -> None:
        """Record the end of the attempt after `step` steps and `tokens` tokens; the first call
        counts.
        """
        if self._ended:
            return
        self._ended = True
        # A finished run repeats nothing, also without a checkpoint.
        kept = (step, tokens) if state == "done" else self._kept
        self.write(
            {
                "event": "end",
                "attempt": self.number,
                "time": timestamp(),
                "state": state,
                "exit_code": exit_code,
                "reason": reason,
                "step": step,
                "saved_step": self._saved_step,
                "lost_steps": max(step - kept[0], 0),
                "lost_tokens": max(tokens - kept[1], 0),
                **self.energy(),
            }
        )

    def write(self, entry: Mapping[str, Any]) -> None:
        """Append one line durably."""
        try:
            append_line(self.path, entry)
        except OSError as error:
            if not self._warned:
                self._warned = True
                logger.warning(
                    f"cannot write {self.path}: {error}. Training continues; the attempt is not "
                    "recorded"
                )


def begin(folder: Path, start: Start) -> Begun:
    """Record the start of an attempt: on rank 0, before anything else in the folder is changed."""
    previous: Sequence[Mapping[str, Any]] = []
    if os.path.exists(folder / ATTEMPTS):
        from titanlite.runs.attempts import read_attempts

        previous = read_attempts(folder)
    number = 1 + max((attempt["attempt"] for attempt in previous), default=0)
    git = provenance.git_state()
    kept = _keep_files(folder, provenance.public_config(start.config_toml), git.diff, number)
    entry = _start_entry(start, number, git, kept)
    lines = []
    if previous:
        entry["after"] = previous[-1].get("state", "killed")
    if entry["after"] == "killed":
        from titanlite.runs.attempts import lost_since

        lost = entry["lost"] = lost_since(folder, previous[-1], start.step, start.tokens)
        lines.append(
            f"attempt {number - 1} was killed and lost at least "
            f"{counted(lost['steps'], 'steps')} ({lost['tokens']:,} tokens), by the last row of "
            "its metrics"
        )
    for key, change in kept.changes.items():
        lines.append(f"config changed since attempt {number - 1}: {key}: {change}")
    record = AttemptRecord(folder, number, start.step, start.tokens, start.resumed)
    record.write(entry)
    return Begun(record, lines)


@dataclass
class _KeptFiles:
    #: "old -> new" by key of the config.
    changes: dict[str, str] = field(default_factory=dict)
    #: New names of files of an attempt before.
    renamed: dict[str, str] = field(default_factory=dict)


def _keep_files(folder: Path, config: str, diff: bytes | None, number: int) -> _KeptFiles:
    kept = _KeptFiles()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if number > 1 and (folder / CONFIG).exists():
            before = read_own(folder / CONFIG).decode(errors="replace")
            from titanlite.runs.config_changes import config_changes

            kept.changes = config_changes(before, config)
        for name, content in ((CONFIG, config.encode()), (DIFF, diff)):
            new_name = _replace(folder / name, content, number - 1)
            if new_name is not None:
                kept.renamed[name] = new_name
    except OSError as error:
        logger.warning(
            f"cannot write to {folder}: {error}. Training continues; config or git.diff of this "
            "run is lost"
        )
    return kept


def _start_entry(
    start: Start, number: int, git: provenance.GitState, kept: _KeptFiles
) -> dict[str, Any]:
    entry: dict[str, Any] = {
        "event": "start",
        "attempt": number,
        "time": timestamp(),
        "launched": provenance.launched(),
        "began": start.began,
        "after": None,
        "step": start.step,
        "steps": start.steps,
        "description": start.description,
        "config_changes": kept.changes,
        "renamed": kept.renamed,
        "config": CONFIG,
        **({"diff": DIFF} if git.diff else {}),
        "ranks": start.ranks,
        "device": start.device,
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "command": provenance.command(start.argv),
        "working_folder": os.getcwd(),
        "git": git.record,
        "versions": provenance.versions(),
        "environment": provenance.environment(os.environ),
    }
    restarts = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0").lstrip("0")
    if restarts:
        entry["torchrun_restarts"] = int(restarts)
    return entry


def _replace(path: Path, content: bytes | None, attempt: int) -> str | None:
    """Return the new name of a former file that differs."""
    old = read_own(path) if path.exists() else None
    if old == content:
        return None
    kept = None
    if old is not None:
        kept = free_name(path, max(attempt, 1))
        path.rename(kept)
    if content is not None:
        atomic_write(path, content)
    return kept.name if kept else None


def free_name(path: Path, number: int = 1) -> Path:
    """Return a name beside a file that no file has: `metrics-1.jsonl`."""
    while (name := path.with_name(f"{path.stem}-{number}{path.suffix}")).exists():
        number += 1
    return name
