"""run.json: what a run was, one entry per attempt. A resume appends an attempt; nothing is overwritten.

    config.toml   the resolved config; an earlier attempt's that differed is kept as config-N.toml
    run.json      {"format": 1, "attempts": [...]}
    git.diff      changes to the checkout the run was started from; earlier ones as git-N.diff
    metrics.jsonl, resume.jsonl, checkpoint/, logs/rank_N.log   written by others

`titanlite.runs.read` reads it back.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from titanlite.runs import provenance
from titanlite.runs.attempts import (
    FILE,
    FORMAT,
    HEARTBEAT_SECONDS,
    RunError,
    read_attempts,
    state_of,
    this_process,
    timestamp,
)
from titanlite.utils import logger

CONFIG = "config.toml"
DIFF = "git.diff"

FinalState = Literal["done", "stopped", "preempted", "failed"]


class RunRecord:
    """This attempt's entry in run.json, kept current by a thread of its own until `finish`.

    A folder that cannot be written to costs the record, with one warning; training never stops.
    """

    def __init__(self, folder: Path, attempts: list[dict[str, Any]], heartbeat_seconds: float) -> None:
        self.path = folder / FILE
        self._attempts = attempts
        self._attempt = attempts[-1]
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._warned = False
        self._write()
        self._thread = threading.Thread(
            target=self._beat, args=(heartbeat_seconds,), name="titanlite-heartbeat", daemon=True
        )
        self._thread.start()

    def finish(self, state: FinalState, step: int, reason: str = "") -> None:
        """Say how the attempt ended, after `step` steps, and why where that needs words. The first call counts."""
        with self._lock:
            if self._ended.is_set():
                return
            self._ended.set()
            now = timestamp()
            self._attempt.update(state=state, step=step, heartbeat=now, ended=now)
            if reason:
                self._attempt["reason"] = reason
            self._write()
        self._thread.join()

    def _beat(self, seconds: float) -> None:
        while not self._ended.wait(seconds):
            with self._lock:
                if not self._ended.is_set():
                    self._attempt["heartbeat"] = timestamp()
                    self._write()

    def _write(self) -> None:
        try:
            text = json.dumps({"format": FORMAT, "attempts": self._attempts}, indent=1)
            _replace(self.path, text.encode())
        except OSError as error:
            if not self._warned:
                self._warned = True
                logger.warning(f"cannot write {self.path}: {error}. Training goes on without a record of the run")


def begin(
    folder: Path,
    toml: str,
    *,
    steps: int | None,
    description: str = "",
    world_size: int,
    device: str,
    first_step: int = 0,
    argv: Sequence[str] | None = None,
    heartbeat_seconds: float = HEARTBEAT_SECONDS,
) -> RunRecord:
    """Record in `folder` that a run begins or, at `first_step` steps done, goes on. Call it on rank 0 only.

    toml: the resolved config. steps: of the whole run. device: its name, for people. argv: the command with the
    program's name, None: `sys.argv`.
    """
    attempts = _earlier(folder / FILE)
    git = provenance.git_state()
    record = dict(git.record)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _keep(folder, CONFIG, "config", provenance.config_text(toml).encode(), attempts)
        _keep(folder, DIFF, "diff", git.diff, attempts)
    except OSError as error:
        logger.warning(f"cannot write to {folder}: {error}. Training goes on; config or git.diff of this run is lost")
    now = timestamp()
    attempt = {
        "state": "running",
        "started": now,
        "heartbeat": now,
        "first_step": first_step,
        "steps": steps,
        "description": description,
        "command": provenance.command(sys.argv if argv is None else argv),
        "working_folder": os.getcwd(),
        "config": CONFIG,
        "world_size": world_size,
        "device": device,
        "host": socket.gethostname(),
        "process": this_process(),
        "versions": provenance.versions(),
        "git": record,
        **({"diff": DIFF} if git.diff else {}),
        "environment": provenance.environment(os.environ),
    }
    return RunRecord(folder, [*attempts, attempt], heartbeat_seconds)


def _earlier(path: Path) -> list[dict[str, Any]]:
    """Attempts recorded before. One that says it is running and is not has died, as of its last sign of life."""
    try:
        attempts = read_attempts(path)
    except FileNotFoundError:
        return []
    except (RunError, OSError) as error:
        kept = _free(path.parent, "run-broken-{}.json")
        logger.warning(f"{error}; kept as {kept.name}, the record begins anew")
        try:
            path.rename(kept)
        except OSError as second:
            logger.warning(f"cannot rename {path}: {second}")
        return []
    for attempt in attempts:
        if attempt.get("state") == "running" and state_of(attempt) == "died":
            attempt.update(state="died", ended=attempt.get("heartbeat"))
    return attempts


def _keep(folder: Path, name: str, field: str, content: bytes | None, attempts: list[dict[str, Any]]) -> None:
    """Write a file of this attempt (None: it has none); an earlier one that differs is renamed, and stays findable."""
    path = folder / name
    old = path.read_bytes() if path.exists() else None
    if old == content:
        return
    if old is not None:
        kept = _free(folder, f"{path.stem}-{{}}{path.suffix}", len(attempts))
        path.rename(kept)
        for attempt in attempts:
            if attempt.get(field) == name:
                attempt[field] = kept.name
    if content is not None:
        _replace(path, content)


def _free(folder: Path, pattern: str, first: int = 1) -> Path:
    return next(p for i in range(max(first, 1), 10**6) if not (p := folder / pattern.format(i)).exists())


def _replace(path: Path, content: bytes) -> None:
    """Write a file whole or not at all."""
    aside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        aside.write_bytes(content)
        os.replace(aside, path)
    finally:
        aside.unlink(missing_ok=True)
