"""What is uploaded already: `.hub/pushed.jsonl` in the folder of a run, a line for each push."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from titanlite.utils import append_line, read_lines

#: Folder of waiting exports in that of a run.
FOLDER = ".hub"
_FILE = "pushed.jsonl"


def note(work: Path, repository: str, step: int, written: float, branches: Sequence[str]) -> None:
    """Note an upload. written: when the checkpoint was, in seconds since 1970. Raises OSError."""
    entry: dict[str, Any] = {"repository": repository, "step": step, "written": written}
    append_line(work / _FILE, {**entry, "branches": list(branches)})


def pushed(work: Path, repository: str) -> set[tuple[int, float, str]]:
    """Return step, time of writing and branch of all that is uploaded to a repository."""
    found: set[tuple[int, float, str]] = set()
    for entry in read_lines(work / _FILE, []):
        step = entry.get("step")
        written = entry.get("written")
        branches = entry.get("branches")
        if entry.get("repository") != repository or not isinstance(branches, list):
            continue
        if isinstance(step, int) and isinstance(written, (int, float)):
            found.update((step, float(written), str(branch)) for branch in branches)
    return found
