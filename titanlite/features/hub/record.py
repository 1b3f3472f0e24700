"""`.hub` in the folder of a run: exports that wait for their upload, and what is uploaded already,
in `pushed.jsonl`, a line for each push.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from titanlite.checkpoint.errors import CheckpointError
from titanlite.checkpoint.manifest import Manifest, parse_manifest
from titanlite.utils import append_line, read_lines

#: End of the name of a folder beside a waiting export, which keeps the manifest.
NOTES = ".notes"
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


def waiting(work: Path) -> dict[int, Manifest]:
    """Return step → manifest of the checkpoints whose exports wait.

    A step may have been computed again after a rollback: the newer one counts.
    """
    found: dict[int, Manifest] = {}
    for notes in work.glob(f"step-*{NOTES}"):
        if not notes.with_suffix("").is_dir():
            continue
        for folder in notes.glob("step-*"):
            with suppress(CheckpointError):
                manifest = parse_manifest(folder)
                known = found.get(manifest.step)
                if known is None or known.created < manifest.created:
                    found[manifest.step] = manifest
    return found
