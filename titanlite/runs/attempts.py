"""The attempts of a run, read from its folder (`titanlite.runs.record` writes them)."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple, TypeGuard

from titanlite.runs import ATTEMPTS, OLD_ATTEMPTS
from titanlite.runs.jsonl import FILE as METRICS
from titanlite.runs.links import read_own
from titanlite.utils import parse_json, read_lines, tell

Attempt = Mapping[str, Any]

_COUNTS = (
    "attempt",
    "step",
    "first_step",
    "steps",
    "exit_code",
    "saved_step",
    "ranks",
    "pid",
    "lost_steps",
    "lost_tokens",
)
_TEXTS = (
    "time",
    "state",
    "reason",
    "began",
    "after",
    "config",
    "diff",
    "host",
    "description",
)
_TABLES = (
    "renamed",
    "config_changes",
    "lost",
    "git",
    "versions",
    "environment",
)
#: Types of what is read from a line.
_TYPES: Mapping[str, type] = {
    **dict.fromkeys(_COUNTS, int),
    **dict.fromkeys(_TEXTS, str),
    **dict.fromkeys(_TABLES, dict),
    "launched": float,
}
_MAY_BE_NULL = (
    "step",
    "first_step",
    "steps",
    "saved_step",
    "after",
    "ranks",
    "pid",
    "host",
    "launched",
)


def read_entries(folder: Path, problems: list[str] | None = None) -> list[dict[str, Any]]:
    """Return the lines of attempts.jsonl, oldest first; none without the file.

    Damaged lines are passed over.

    problems: as for `utils.read_lines`.
    """
    found: list[dict[str, Any]] = []
    said: list[str] = []
    for entry in read_lines(folder / ATTEMPTS, problems):
        if entry.get("event") not in ("start", "end"):
            continue
        if wrong := _misfit(entry):
            said.append(f"{folder / ATTEMPTS}: a line whose {wrong} is passed over")
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


def _is_count(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**63


def read_attempts(folder: Path, problems: list[str] | None = None) -> Sequence[Attempt]:
    """Return the attempts of a run, oldest first. Unreadable records count as missing.

    An attempt is its start entry and its end entry in one. "time" becomes "started" and
    "ended" (seconds since 1970). The "step" of the start becomes "first_step". Without an end it
    has neither "ended" nor "state", and "lost" is of the attempt before. problems: as for
    `utils.read_lines`.
    """
    found: dict[int, dict[str, Any]] = {}
    for entry in read_entries(folder, problems):
        number = entry["attempt"]
        time = _seconds(entry.get("time"))
        if entry["event"] == "start":
            found[number] = {**entry, "started": time, "first_step": entry.get("step")}
        elif number in found:
            found[number].update({**entry, "ended": time})
    older = _add_old(found.values(), folder / OLD_ATTEMPTS)
    attempts = [*older, *found.values()]
    _name_kept_files(attempts)
    return attempts


def _add_old(found: Collection[dict[str, Any]], path: Path) -> list[dict[str, Any]]:
    """Complete attempts by what run.json tells of them; return those that it alone tells of."""
    older = []
    for number, old in enumerate(_old_attempts(path), 1):
        part = _same_process(found, old)
        if part is not None:
            part.update({**old, **part})
        else:
            older.append({"attempt": number, **old})
    return older


def _same_process(found: Iterable[dict[str, Any]], old: Attempt) -> dict[str, Any] | None:
    """Return the part of an old attempt that stands in attempts.jsonl; None without one."""
    for part in found:
        is_of_process = (part.get("host"), part.get("pid")) == (old.get("host"), old["pid"])
        if "command" not in part and is_of_process:
            return part
    return None


def _name_kept_files(attempts: Sequence[dict[str, Any]]) -> None:
    """Give each attempt the present names of its files: a later start with others renames them."""
    names: dict[str, str] = {}
    for attempt in reversed(attempts):
        for key in ("config", "diff"):
            if key in attempt:
                attempt[key] = names.get(attempt[key], attempt[key])
        names.update(attempt.get("renamed", {}))


def _old_attempts(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the attempts in a run.json in the form of `read_attempts`."""
    with suppress(OSError, ValueError, TypeError, KeyError, AttributeError):
        for old in parse_json(read_own(path))["attempts"]:
            new = {
                **old,
                "started": _seconds(old.get("started")),
                "ended": _seconds(old.get("ended")),
                "ranks": old.get("world_size"),
                "pid": (old.get("process") or {}).get("id"),
            }
            if old.get("state") in ("running", "died"):
                del new["state"], new["ended"]
            if not _misfit({"attempt": 1, **new}):
                yield new


def lost_since(folder: Path, attempt: Attempt, step: int, tokens: int) -> dict[str, int]:
    """Return what a killed attempt did after a step, at which so many tokens were seen, and the
    time of its last row.

    Only its metrics can tell.
    """
    # The run that resumes names the damaged lines when it takes the file over.
    reached = _newest_row(read_lines(folder / METRICS, problems=[]))
    return {
        "attempt": attempt["attempt"],
        "steps": max(reached.step - step, 0),
        "tokens": max(reached.tokens - tokens, 0),
        **({"seen": reached.time} if reached.time else {}),
    }


class _Row(NamedTuple):
    step: int = 0
    tokens: int = 0
    #: Seconds since 1970; 0: unknown.
    time: int = 0


def _newest_row(rows: Sequence[Mapping[str, Any]]) -> _Row:
    """Return step, tokens seen and time of the last training row; zeros without one."""
    for row in reversed(rows):
        step, tokens = row.get("step"), row.get("tokens_seen")
        if _is_count(step) and _is_count(tokens):
            time = row.get("time")
            is_time = isinstance(time, int | float) and 0 <= time < 2**63
            return _Row(step, tokens, int(time) if is_time else 0)
    return _Row()


def _seconds(text: object) -> float | None:
    """Return an ISO 8601 time as seconds since 1970; None for anything else."""
    with suppress(ValueError, OverflowError):
        return datetime.fromisoformat(str(text)).timestamp()
    return None
