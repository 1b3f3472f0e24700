"""The attempts of a run, read from its folder (`titanlite.runs.record` writes them)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any, TypedDict

import msgspec

from titanlite.runs import ATTEMPTS
from titanlite.runs.metrics_jsonl import FILE as METRICS
from titanlite.runs.prediction import Prediction
from titanlite.runs.read_jsonl import read_lines, tell

Attempt = Mapping[str, Any]

_MOST = 2**63 - 1
Count = Annotated[int, msgspec.Meta(ge=-_MOST, le=_MOST)]


class _Needed(TypedDict):
    attempt: Count


class _Entry(_Needed, total=False):
    time: str
    state: str
    reason: str
    began: str
    after: str | None
    config: str
    diff: str
    host: str | None
    description: str
    step: Count | None
    first_step: Count | None
    steps: Count | None
    saved_step: Count | None
    exit_code: Count
    ranks: Count | None
    pid: Count | None
    lost_steps: Count
    lost_tokens: Count
    launched: float | None
    renamed: dict[str, str]
    config_changes: dict[str, str]
    lost: dict[str, Count]
    git: dict[str, Any]
    versions: dict[str, Any]
    environment: dict[str, Any]
    predicted: Prediction


def read_entries(folder: Path, problems: list[str] | None = None) -> list[dict[str, Any]]:
    """Return the lines of attempts.jsonl, oldest first, but for damaged ones.

    problems: as for `read_lines`.
    """
    found: list[dict[str, Any]] = []
    said: list[str] = []
    for entry in read_lines(folder / ATTEMPTS, problems):
        if entry.get("event") not in ("start", "predicted", "end"):
            continue
        try:
            msgspec.convert(entry, _Entry)
            found.append(entry)
        except msgspec.ValidationError as error:
            said.append(f"{folder / ATTEMPTS}: a line is passed over: {error}")
    tell(said, problems)
    return found


def read_attempts(folder: Path, problems: list[str] | None = None) -> Sequence[Attempt]:
    """Return the attempts of a run, oldest first. Unreadable records count as missing.

    An attempt is its start entry and its end entry in one: "time" becomes "started" and "ended"
    (seconds since 1970), the start's "step" "first_step". "predicted" is a `Prediction`. Without an
    end it has neither "ended" nor "state"; "lost" is of the attempt before. problems: as for
    `read_lines`.
    """
    found: dict[int, dict[str, Any]] = {}
    for entry in read_entries(folder, problems):
        number = entry["attempt"]
        time = _seconds(entry.get("time"))
        if entry["event"] == "start":
            found[number] = {**entry, "started": time, "first_step": entry.get("step")}
        elif number in found:
            found[number].update(entry)
            if entry["event"] == "end":
                found[number]["ended"] = time
    attempts = list(found.values())
    # A later start with others renames the files of an attempt.
    names: dict[str, str] = {}
    for attempt in reversed(attempts):
        for key in ("config", "diff"):
            if key in attempt:
                attempt[key] = names.get(attempt[key], attempt[key])
        names.update(attempt.get("renamed", {}))
    return attempts


class _Row(msgspec.Struct):
    step: Count
    tokens_seen: Count
    #: Seconds since 1970; 0: unknown.
    time: Annotated[float, msgspec.Meta(ge=0, lt=2**63)] = 0.0


def lost_since(folder: Path, attempt: Attempt, step: int, tokens: int) -> dict[str, int]:
    """Return what a killed attempt did after a step, by its metrics, and its last row's time.

    tokens: seen at `step`.
    """
    # The run that resumes names the damaged lines when it takes the file over.
    reached = _Row(0, 0)
    for row in reversed(read_lines(folder / METRICS, problems=[])):
        with suppress(msgspec.ValidationError):
            reached = msgspec.convert(row, _Row)
            break
    return {
        "attempt": attempt["attempt"],
        "steps": max(reached.step - step, 0),
        "tokens": max(reached.tokens_seen - tokens, 0),
        **({"seen": int(reached.time)} if reached.time else {}),
    }


def _seconds(text: object) -> float | None:
    """Return an ISO 8601 time in seconds since 1970."""
    with suppress(ValueError, OverflowError):
        return datetime.fromisoformat(str(text)).timestamp()
    return None
