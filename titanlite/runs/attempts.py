"""Attempts: the entries of run.json, and whether the one that says it is running still is."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from titanlite import exit_codes

FILE = "run.json"
FORMAT = 1
#: Seconds between signs of life.
HEARTBEAT_SECONDS = 15.0
#: Without a sign of life for so long a run on another machine counts as dead.
DEAD_SECONDS = 6 * HEARTBEAT_SECONDS

_STATES = ("running", "done", "stopped", "preempted", "failed", "died")


class RunError(ValueError):
    """A folder is no run, or something in it cannot be read; the text names the file and what to do."""

    exit_code = exit_codes.CONFIG


def state_of(attempt: Mapping[str, Any], now: float | None = None) -> str:
    """The state of an attempt: as it was recorded, but "died" for one that says running and shows no life.

    On the machine it runs on its process is looked for; elsewhere the age of its last sign of life decides, by
    both machines' clocks. now: seconds since 1970.
    """
    state = str(attempt.get("state"))
    if state != "running":
        return state if state in _STATES else "unknown"
    process = attempt.get("process")
    if isinstance(process, dict) and process.get("space") and process.get("space") == process_space():
        return "running" if process_start(int(process.get("id", 0))) == process.get("started") else "died"
    beat = seconds(attempt.get("heartbeat"))
    now = datetime.now(timezone.utc).timestamp() if now is None else now
    return "died" if beat is None or now - beat > DEAD_SECONDS else "running"


def seconds(text: object) -> float | None:
    """An ISO 8601 time as seconds since 1970; None for what is none."""
    try:
        return datetime.fromisoformat(str(text)).timestamp()
    except ValueError:
        return None


def read_attempts(path: Path) -> list[dict[str, Any]]:
    """The attempts of a run.json, oldest first. Raises FileNotFoundError, and RunError for no record of ours."""
    try:
        record = json.loads(path.read_bytes())
    except ValueError as error:
        raise RunError(f"{path}: not JSON ({error}); rename it to read the rest of the run") from None
    attempts = record.get("attempts") if isinstance(record, dict) else None
    if not isinstance(attempts, list) or not attempts or not all(isinstance(a, dict) for a in attempts):
        raise RunError(f"{path}: not a record of a run: no list of attempts; rename it to read the rest of the run")
    if record.get("format") != FORMAT:
        raise RunError(
            f"{path}: written in format {record.get('format')!r}, this titanlite reads {FORMAT}; "
            "read it with the version that wrote it"
        )
    return attempts


def timestamp() -> str:
    """Now, in UTC, as ISO 8601 to the millisecond."""
    return datetime.now(timezone.utc).isoformat(timespec="milliseconds")


def this_process() -> dict[str, Any]:
    """What finds this process again: its id, when it started, and the space in which the id means something.

    Only the id where the system has no /proc.
    """
    found: dict[str, Any] = {"id": os.getpid()}
    started, space = process_start(os.getpid()), process_space()
    return {**found, "started": started, "space": space} if started is not None and space else found


def process_start(pid: int) -> int | None:
    """Clock ticks from the machine's boot to the start of a process; None where there is no such process."""
    try:
        # The name in parentheses may itself hold spaces and parentheses; a zombie (Z, X) has ended.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else int(fields[19])


def process_space() -> str | None:
    """Names this boot of this machine and this container's process ids; None where there is no /proc."""
    try:
        return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return None
