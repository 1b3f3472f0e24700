"""What is uploaded already: `.hub/pushed.jsonl` in the folder of a run, a line for each push."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from titanlite.utils import append_line, read_lines

#: Folder of waiting exports in that of a run.
FOLDER = ".hub"
#: End of the name of a folder beside a waiting export, which keeps the manifest.
NOTES = ".notes"
_FILE = "pushed.jsonl"
_WAITING = re.compile(r"step-(\d+)-[0-9a-f]+")


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


def waiting(work: Path) -> list[int]:
    """Return the steps of exports that wait for their upload."""
    found = []
    for folder in work.glob("step-*"):
        match = _WAITING.fullmatch(folder.name)
        if match is not None and folder.is_dir():
            found.append(int(match[1]))
    return sorted(set(found))
