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

A killed attempt has no end; the next start records its loss under `lost`, as far as metrics.jsonl
tells. Beside it lie

    config.toml   the resolved config; an earlier attempt's that differs is kept as config-N.toml
    git.diff      changes to the checkout that titanlite was run from; earlier ones as git-N.diff

titanlite 0.1.0 wrote only a part of a start here, and all of it into run.json, which is still read.
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from titanlite.metrics.jsonl import FILE as METRICS
from titanlite.runs import provenance
from titanlite.utils import (
    append_line,
    atomic_write,
    counted,
    logger,
    parse_json,
    read_lines,
    tell,
    timestamp,
)

if TYPE_CHECKING:
    from titanlite.checkpoint.paths import AnyPath

FILE = "attempts.jsonl"
#: In folders of titanlite 0.1.0.
OLD_FILE = "run.json"
CONFIG = "config.toml"
DIFF = "git.diff"

FinalState = Literal["done", "stopped", "preempted", "failed"]
Attempt = Mapping[str, Any]

_MAY_BE_NULL = ("step", "first_step", "steps", "saved_step", "after", "ranks", "pid", "host")
#: Types of what is read from a line.
_TYPES: Mapping[str, type] = {
    **dict.fromkeys(
        ("attempt", "step", "first_step", "steps", "exit_code", "saved_step", "ranks", "pid"), int
    ),
    **dict.fromkeys(("lost_steps", "lost_tokens"), int),
    **dict.fromkeys(
        ("time", "state", "reason", "began", "after", "config", "diff", "host", "description"), str
    ),
    **dict.fromkeys(("renamed", "config_changes", "lost", "git", "versions", "environment"), dict),
}


class AttemptRecord:
    """Writes the lines of the attempt under way. A failed write costs the lines, with one
    warning.
    """

    def __init__(self, folder: Path, number: int, step: int, tokens: int, resumed: bool) -> None:
        self.path = folder / FILE
        self.number = number
        self._saved_step: int | None = step if resumed else None
        self._kept = step, tokens
        self._ended = self._warned = False

    def saved(self, step: int, tokens: int) -> None:
        """Note that the checkpoint of `step`, after so many tokens, exists."""
        self._saved_step, self._kept = step, (step, tokens)

    def end(
        self, state: FinalState, step: int, tokens: int = 0, exit_code: int = 0, reason: str = ""
    ) -> None:
        """Record the end of the attempt after `step` steps and `tokens` tokens.

        Only the first call counts.
        """
        if self._ended:
            return
        self._ended = True
        # A finished run repeats nothing, also without a checkpoint.
        kept = (step, tokens) if state == "done" else self._kept
        lost_steps, lost_tokens = max(step - kept[0], 0), max(tokens - kept[1], 0)
        about = {
            "event": "end",
            "attempt": self.number,
            "time": timestamp(),
            "state": state,
            "exit_code": exit_code,
        }
        steps = {
            "step": step,
            "saved_step": self._saved_step,
            "lost_steps": lost_steps,
            "lost_tokens": lost_tokens,
        }
        self.write({**about, "reason": reason, **steps})

    def write(self, entry: Mapping[str, Any]) -> None:
        """Append one line durably."""
        try:
            append_line(self.path, entry)
        except OSError as error:
            if not self._warned:
                self._warned = True
                logger.warning(
                    f"cannot write {self.path}: {error}. Training goes on; the attempt is not "
                    "recorded"
                )


def begin(
    folder: Path,
    *,
    config_toml: str,
    steps: int,
    ranks: int,
    device: str,
    description: str = "",
    step: int = 0,
    tokens: int = 0,
    resumed: bool = False,
    source: AnyPath | None = None,
    argv: Sequence[str] | None = None,
) -> tuple[AttemptRecord, list[str]]:
    """Record that an attempt starts at `step` steps and `tokens` tokens; returns its record, and
    lines for the log.

    Call it on rank 0 only, before anything else in the folder is changed. steps: of the whole run.
    source: another run's checkpoint that it starts from. argv: the command with the program's name;
    None: `sys.argv`.
    """
    previous = read_attempts(folder)
    number = 1 + max((attempt["attempt"] for attempt in previous), default=0)
    after = previous[-1].get("state", "killed") if previous else None
    git = provenance.git_state()
    config = provenance.public_config(config_toml)
    changes, renamed = {}, {}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if previous:
            before = (
                (folder / CONFIG).read_text("utf-8", "replace")
                if (folder / CONFIG).exists()
                else None
            )
            changes = provenance.config_changes(before, config)
        for name, content in ((CONFIG, config.encode()), (DIFF, git.diff)):
            if kept := _replace(folder / name, content, number - 1):
                renamed[name] = kept
    except OSError as error:
        logger.warning(
            f"cannot write to {folder}: {error}. Training goes on; config or git.diff of this run "
            "is lost"
        )
    entry: dict[str, Any] = {
        "event": "start",
        "attempt": number,
        "time": timestamp(),
        "began": f"resumed from step {step}"
        if resumed
        else "fresh"
        if source is None
        else f"from {source}",
        "after": after,
        "step": step,
        "steps": steps,
        "description": description,
        "config_changes": changes,
        "renamed": renamed,
        "config": CONFIG,
        **({"diff": DIFF} if git.diff else {}),
        "ranks": ranks,
        "device": device,
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "command": provenance.command(sys.argv if argv is None else argv),
        "working_folder": os.getcwd(),
        "git": git.record,
        "versions": provenance.versions(),
        "environment": provenance.environment(os.environ),
    }
    if restarts := os.environ.get("TORCHELASTIC_RESTART_COUNT", "0").lstrip("0"):
        entry["torchrun_restarts"] = int(restarts)
    lines = []
    if after == "killed":
        reached = _newest_row(folder / METRICS)
        lost_steps, lost_tokens = max(reached[0] - step, 0), max(reached[1] - tokens, 0)
        entry["lost"] = {
            "attempt": previous[-1]["attempt"],
            "steps": lost_steps,
            "tokens": lost_tokens,
        }
        lines.append(
            f"attempt {number - 1} was killed and lost at least {counted(lost_steps, 'steps')} "
            f"({lost_tokens:,} tokens), by the last row of its metrics"
        )
    lines += [
        f"config changed since attempt {number - 1}: {key}: {change}"
        for key, change in changes.items()
    ]
    record = AttemptRecord(folder, number, step, tokens, resumed)
    record.write(entry)
    return record, lines


def read_entries(folder: Path, problems: list[str] | None = None) -> list[dict[str, Any]]:
    """Return the lines of attempts.jsonl, oldest first; none without the file.

    Damaged lines are passed over.

    problems: as for `utils.read_lines`.
    """
    found: list[dict[str, Any]] = []
    said: list[str] = []
    for entry in read_lines(folder / FILE, problems):
        if entry.get("event") not in ("start", "end"):
            continue
        if wrong := _misfit(entry):
            said.append(f"{folder / FILE}: a line whose {wrong} is passed over")
        else:
            found.append(entry)
    tell(said, problems)
    return found


def _misfit(entry: Mapping[str, Any]) -> str:
    """Return what is wrong with a line of attempts.jsonl; "" for a line that this program may have
    written.
    """
    if entry.get("attempt") is None:
        return "attempt is missing"
    for name, kind in _TYPES.items():
        value = entry.get(name)
        if value is None and (name not in entry or name in _MAY_BE_NULL):
            continue
        if not isinstance(value, kind) or (kind is int and not _is_count(value)):
            return f"{name} is {value!r:.40}"
    for name in ("renamed", "config_changes"):
        if not all(isinstance(text, str) for text in (entry.get(name) or {}).values()):
            return f"{name} has an entry that is no text"
    if not all(_is_count(number) for number in (entry.get("lost") or {}).values()):
        return "lost has an entry that is no number"
    return ""


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**63


def read_attempts(folder: Path, problems: list[str] | None = None) -> Sequence[Attempt]:
    """Return the attempts of a run, oldest first. Unreadable records count as missing.

    An attempt is its start entry and its end entry in one: "time" becomes "started" and "ended"
    (seconds since 1970), and the "step" of the start "first_step". Without an end it has neither
    "ended" nor "state". problems: as for `utils.read_lines`.
    """
    found: dict[int, dict[str, Any]] = {}
    older: list[dict[str, Any]] = []
    for entry in read_entries(folder, problems):
        number, time = entry["attempt"], _seconds(entry.get("time"))
        if entry["event"] == "start":
            found[number] = {**entry, "started": time, "first_step": entry.get("step")}
        elif number in found:
            found[number].update({**entry, "ended": time})
    for i, old in enumerate(
        _old_attempts(folder / OLD_FILE), 1
    ):  # a part of it stands in attempts.jsonl, too
        parts = (one for one in found.values() if "command" not in one)
        part = next(
            (
                one
                for one in parts
                if (one.get("host"), one.get("pid")) == (old.get("host"), old["pid"])
            ),
            None,
        )
        if part is not None:
            part.update({**old, **part})
        else:
            older.append({"attempt": i, **old})
    attempts = [*older, *found.values()]
    names: dict[str, str] = {}
    for attempt in reversed(
        attempts
    ):  # the files of an attempt are renamed by the next start with others
        attempt.update(
            {
                key: names.get(attempt[key], attempt[key])
                for key in ("config", "diff")
                if key in attempt
            }
        )
        names.update(attempt.get("renamed", {}))
    return attempts


def _old_attempts(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the attempts in a run.json in the form of `read_attempts`."""
    with suppress(OSError, ValueError, TypeError, KeyError, AttributeError):
        for old in parse_json(path.read_bytes())["attempts"]:
            times = {"started": _seconds(old.get("started")), "ended": _seconds(old.get("ended"))}
            new = {
                **old,
                **times,
                "ranks": old.get("world_size"),
                "pid": (old.get("process") or {}).get("id"),
            }
            if old.get("state") in ("running", "died"):
                del new["state"], new["ended"]
            if not _misfit({"attempt": 1, **new}):
                yield new


def _replace(path: Path, content: bytes | None, attempt: int) -> str | None:
    """Write a file of this attempt (None: it has none); returns the new name of a former one that
    differs.
    """
    old = path.read_bytes() if path.exists() else None
    if old == content:
        return None
    kept = None
    if old is not None:
        names = (
            path.with_name(f"{path.stem}-{i}{path.suffix}") for i in range(max(attempt, 1), 10**6)
        )
        kept = next(name for name in names if not name.exists())
        path.rename(kept)
    if content is not None:
        atomic_write(path, content)
    return kept.name if kept else None


def _newest_row(path: Path) -> tuple[Any, Any]:
    """Return step and tokens seen of the last training row; zeros without one."""
    # The run that resumes names the damaged lines when it takes the file over.
    for row in reversed(read_lines(path, problems=[])):
        step, tokens = row.get("step"), row.get("tokens_seen")
        if _is_count(step) and _is_count(tokens):
            return step, tokens
    return 0, 0


def _seconds(text: object) -> float | None:
    """Return an ISO 8601 time as seconds since 1970; None for anything else."""
    with suppress(ValueError, OverflowError):
        return datetime.fromisoformat(str(text)).timestamp()
    return None
