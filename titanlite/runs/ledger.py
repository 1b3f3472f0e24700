"""attempts.jsonl: a line for each start of a run and for each end, only ever appended to.

    {"event": "start", "attempt": 2, "time": …, "began": "resumed from step 40", "after": "preempted", "step": 40,
     "config_changes": {"optimizer.lr": "0.001 -> 0.002"}, "ranks": 8, "host": …, "versions": {…}}
    {"event": "end", "attempt": 2, "time": …, "state": "preempted", "exit_code": 5, "reason": "SIGTERM on every rank",
     "step": 97, "saved_step": 97, "lost_steps": 0, "lost_tokens": 0}

An attempt that was killed has no end; the next start says so under `lost`, as far as metrics.jsonl tells.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from titanlite.config.plans import Plans
from titanlite.config.scan import TOMLDecodeError, loads
from titanlite.observe.metrics import FILE as METRICS
from titanlite.runs import provenance
from titanlite.runs.attempts import timestamp
from titanlite.runs.folder import CONFIG
from titanlite.utils import Table, counted, logger, render

if TYPE_CHECKING:
    from titanlite.checkpoint.paths import AnyPath

FILE = "attempts.jsonl"
#: The end of a metrics.jsonl in which its newest row is looked for.
_TAIL_BYTES = 1 << 18
#: What only says where a config was written.
_NOT_COMPARED = ("job.config_file", "job.extends", "job.dialect")


@dataclass(frozen=True)
class Before:
    """What the folder says of earlier attempts. To be read before this one writes anything there."""

    attempts: int
    #: State of the last one; "killed" where it has no end, None where there was none.
    state: str | None
    #: Its config by `section.key`; None where there is none to read.
    config: Mapping[str, Any] | None
    #: Step and tokens of the newest training row.
    step: int
    tokens: int


def look_back(folder: Path) -> Before:
    """Read what earlier attempts left. Whatever cannot be read counts as not there."""
    entries = read_entries(folder)
    starts = [entry for entry in entries if entry.get("event") == "start"]
    attempts = max((int(entry.get("attempt", 0)) for entry in starts), default=0)
    state: str | None = None
    if starts:
        ends = [e for e in entries if e.get("event") == "end" and e.get("attempt") == starts[-1].get("attempt")]
        state = str(ends[-1].get("state")) if ends else "killed"
    step, tokens = _newest_row(folder / METRICS)
    return Before(attempts, state, _config(folder / CONFIG) if starts else None, step, tokens)


class Ledger:
    """This attempt's lines. What cannot be written costs the lines, with one warning; training never stops."""

    def __init__(self, path: Path, attempt: int, step: int, tokens: int, resumed: bool) -> None:
        self.path = path
        self.attempt = attempt
        self._saved_step: int | None = step if resumed else None
        self._kept = step, tokens
        self._ended = False
        self._warned = False

    def saved(self, step: int, tokens: int) -> None:
        """A checkpoint of `step`, after so many tokens, is there."""
        self._saved_step, self._kept = step, (step, tokens)

    def end(self, state: str, step: int, tokens: int, exit_code: int, reason: str = "") -> None:
        """How the attempt ended, after `step` steps and `tokens` tokens. The first call counts."""
        if self._ended:
            return
        self._ended = True
        # What a finished run did is never done again, also where it keeps no checkpoint.
        kept = (step, tokens) if state == "done" else self._kept
        self.write(
            {
                "event": "end",
                "attempt": self.attempt,
                "time": timestamp(),
                "state": state,
                "exit_code": exit_code,
                "reason": reason,
                "step": step,
                "saved_step": self._saved_step,
                "lost_steps": max(step - kept[0], 0),
                "lost_tokens": max(tokens - kept[1], 0),
            }
        )

    def write(self, entry: Mapping[str, Any]) -> None:
        """Append one line, durable when this returns. The folder is made where there is none."""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
            try:
                size = os.fstat(file).st_size
                # A line that a crash tore stays a line of its own.
                torn = size > 0 and os.pread(file, 1, size - 1) != b"\n"
                os.write(file, (b"\n" * torn) + (json.dumps(entry) + "\n").encode())
                os.fsync(file)
            finally:
                os.close(file)
        except OSError as error:
            if not self._warned:
                self._warned = True
                logger.warning(f"cannot write {self.path}: {error}. Training goes on; the attempt is not recorded")


def begin(
    folder: Path,
    before: Before,
    plans: Plans,
    *,
    world_size: int,
    device: str,
    step: int,
    tokens: int,
    resumed: bool,
    source: AnyPath | None = None,
) -> tuple[Ledger, list[str]]:
    """Record that an attempt starts at `step` steps and `tokens` tokens; also lines to tell a person.

    Call it on rank 0 only. before: of `look_back`. source: another run's checkpoint that it begins with.
    """
    began = f"resumed from step {step}" if resumed else "fresh" if source is None else f"from {source}"
    changes = {}
    if before.config is not None:
        now = dict(flat(loads(provenance.config_text(plans.config_toml))))
        changes = config_changes(before.config, now)
    ledger = Ledger(folder / FILE, before.attempts + 1, step, tokens, resumed)
    entry: dict[str, Any] = {
        "event": "start",
        "attempt": ledger.attempt,
        "time": timestamp(),
        "began": began,
        "after": before.state,
        "step": step,
        "config_changes": changes,
        "ranks": world_size,
        "device": device,
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "versions": provenance.versions(),
    }
    if restarts := os.environ.get("TORCHELASTIC_RESTART_COUNT", "0").lstrip("0"):
        entry["torchrun_restarts"] = int(restarts)
    lines = []
    if before.state == "killed":
        lost_steps, lost_tokens = max(before.step - step, 0), max(before.tokens - tokens, 0)
        entry["lost"] = {"attempt": before.attempts, "steps": lost_steps, "tokens": lost_tokens}
        lines.append(
            f"attempt {before.attempts} was killed and lost at least {counted(lost_steps, 'steps')} "
            f"({lost_tokens:,} tokens), by the last row of its metrics"
        )
    lines += [f"config changed since attempt {before.attempts}: {key}: {change}" for key, change in changes.items()]
    ledger.write(entry)
    return ledger, lines


def read_entries(folder: Path) -> list[dict[str, Any]]:
    """The lines of a folder's ledger, oldest first; none where there is no ledger. Torn lines are left out."""
    try:
        lines = (folder / FILE).read_bytes().splitlines()
    except OSError:
        return []
    return [entry for line in lines if (entry := _parsed(line)) is not None]


def config_changes(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, str]:
    """By key, "old -> new" of what differs; values as in JSON, "(not set)" for what is not there."""

    def shown(config: Mapping[str, Any], key: str) -> str:
        return json.dumps(config[key], default=str) if key in config else "(not set)"

    keys = [key for key in dict.fromkeys([*old, *new]) if key not in _NOT_COMPARED]
    return {key: f"{shown(old, key)} -> {shown(new, key)}" for key in keys if old.get(key) != new.get(key)}


def toml_changes(old: object, new: object) -> dict[str, str]:
    """`config_changes` of two configs as TOML texts; none where either is no such text."""
    if not (isinstance(old, str) and isinstance(new, str)):
        return {}
    try:
        return config_changes(dict(flat(loads(old))), dict(flat(loads(new))))
    except TOMLDecodeError:
        return {}


def flat(table: Mapping[str, Any], lead: Sequence[str] = ()) -> Iterator[tuple[str, Any]]:
    """A TOML table's values by dotted key."""
    for name, value in table.items():
        if isinstance(value, dict):
            yield from flat(value, (*lead, name))
        else:
            yield ".".join((*lead, name)), value


def attempts_text(folder: Path, terminal: bool) -> str:
    """The attempts of a run as a table; "" where the folder has no ledger."""
    entries = read_entries(folder)
    rows, notes = [], []
    for start in (entry for entry in entries if entry.get("event") == "start"):
        number = start.get("attempt")
        end = next((e for e in entries if e.get("event") == "end" and e.get("attempt") == number), {})
        lost: Mapping[str, Any] = next((e["lost"] for e in entries if e.get("lost", {}).get("attempt") == number), {})
        rows.append(
            [
                str(number),
                str(start.get("time", ""))[:19].replace("T", " "),
                str(start.get("began", "")),
                str(end.get("time", ""))[:19].replace("T", " ") or "–",
                str(end.get("state", "no end")),
                _shown(end.get("exit_code")),
                _shown(end.get("step")),
                _shown(end.get("saved_step")),
                # Records of before say of a finished run without checkpoints that it lost everything.
                _shown(0 if end.get("state") == "done" else end.get("lost_tokens", lost.get("tokens"))),
            ]
        )
        if end.get("reason"):
            notes.append(f"attempt {number}: {end['reason']}")
        notes += [f"attempt {number}: {key}: {change}" for key, change in start.get("config_changes", {}).items()]
    if not rows:
        return ""
    columns = ("attempt", "started (UTC)", "began", "ended (UTC)", "state", "exit", "step", "saved", "tokens lost")
    table = render(Table(columns, rows, left=(1, 2, 3, 4), title=str(folder)), terminal)
    return "\n".join([table, *(f"note: {note}" for note in notes)])


def _shown(value: object) -> str:
    return f"{value:,}" if isinstance(value, int) else "–"


def _parsed(line: bytes) -> dict[str, Any] | None:
    try:
        entry = json.loads(line)
    except ValueError:
        return None
    return entry if isinstance(entry, dict) else None


def _newest_row(path: Path) -> tuple[int, int]:
    """Step and tokens seen of the last training row; zeros where there is none."""
    try:
        with open(path, "rb") as file:
            file.seek(max(os.fstat(file.fileno()).st_size - _TAIL_BYTES, 0))
            lines = file.read().splitlines()
    except OSError:
        return 0, 0
    for line in reversed(lines):
        row = _parsed(line)
        if row is not None and isinstance(row.get("step"), int) and isinstance(row.get("tokens_seen"), int):
            return row["step"], row["tokens_seen"]
    return 0, 0


def _config(path: Path) -> dict[str, Any] | None:
    try:
        return dict(flat(loads(path.read_text(encoding="utf-8"))))
    except (OSError, TOMLDecodeError, UnicodeDecodeError):
        return None
