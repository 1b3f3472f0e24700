"""Folders of checkpoints: what is in them, which one is meant, whether its files are right. It also
deletes checkpoints. No torch.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from titanlite.checkpoint.errors import CheckpointError, NewerFormatError
from titanlite.checkpoint.hf_files import holds_adapters, holds_weights
from titanlite.checkpoint.manifest import (
    DELETED,
    FILE,
    NAMES,
    PARTIAL,
    PIN,
    REASON,
    Manifest,
    Progress,
    check_files,
    find,
    progress,
    read_manifest,
    refuse_older,
    root_of,
    step_folder,
    step_of,
    steps_in,
)
from titanlite.checkpoint.paths import AnyPath, entries, files_in, to_path
from titanlite.checkpoint.retention import (
    delete,
    is_pinned,
    leftover_folder,
    leftovers,
    unpublish,
)
from titanlite.utils import say

VALID = "valid"
INVALID = "invalid"
NEWER = "newer format"


@dataclass(frozen=True)
class Entry:
    """One folder among the checkpoints, or the mark of a leftover."""

    folder: AnyPath
    #: "valid", "invalid", "newer format" (of a later titanlite) or "being deleted". "set aside": an
    #: invalid one, quarantined when its step was saved again. "partial": a save under way or cut
    #: short.
    state: str
    #: Why it is not valid.
    reason: str
    pinned: bool
    manifest: Manifest | None
    #: Bytes of its files.
    size: int

    @property
    def step(self) -> int:
        """Return the step in its name; -1 for a name without one."""
        match = re.search(r"step-(\d+)", self.folder.name)
        return int(match.group(1)) if match else -1

    @property
    def description(self) -> str:
        text = self.state
        if self.manifest is not None and self.manifest.weights_only:
            text += ", weights only"
        if self.pinned:
            text += ", pinned"
        return text


def inspect(path: AnyPath) -> Entry:
    """Return the state of a folder or mark, by its name, its manifest and the sizes of its
    files.
    """
    manifest = None
    reason = ""
    state = VALID
    folder = path
    if path.name.startswith((PARTIAL, DELETED)):
        state = "partial" if path.name.startswith(PARTIAL) else "being deleted"
        folder = leftover_folder(path) or path
    elif step_of(path) is None:
        state = "set aside"
        with suppress(FileNotFoundError):
            reason = (path / REASON).read_bytes().decode(errors="replace").rstrip()
    else:
        try:
            manifest = read_manifest(path)
        except CheckpointError as error:
            state = NEWER if isinstance(error, NewerFormatError) else INVALID
            reason = str(error)
    size = sum(file.st_size for file in files_in(folder).values())
    return Entry(path, state, reason, is_pinned(folder), manifest, size)


def list_checkpoints(root: AnyPath) -> list[Entry]:
    """Return all entries of a folder of checkpoints, by step."""
    left = {leftover_folder(mark): mark for mark in leftovers(root)}
    # Marks of whole checkpoints have no folder.
    left.pop(None, None)
    found = list(left.values())
    for name, is_folder in entries(root).items():
        folder = root / name
        if is_folder and NAMES.fullmatch(name) and folder not in left:
            found.append(folder)
    return sorted(map(inspect, found), key=lambda entry: (entry.step, entry.folder.name))


def checkpoint_of(path: AnyPath | str) -> AnyPath:
    """Return the checkpoint that is meant: `path`, or the newest valid one of its folder.

    Raises CheckpointError.
    """
    path = to_path(path)
    if step_of(path) is not None or (path / FILE).is_file():
        if not path.is_dir():
            raise CheckpointError(f"{path}: no such checkpoint")
        return path
    root = root_of(path)
    return step_folder(root, find(root).valid(root).step)


def check_weights(path: AnyPath) -> None:
    """Look whether a path can hold weights, without torch. Raises CheckpointError.

    Weights of other programs, and files of torch's, are only looked for; their contents are read
    later.
    """
    if path.is_file() and not path.name.endswith(".toml"):
        return
    if path.is_dir() and (holds_weights(path) or holds_adapters(path)):
        return
    if path.is_dir() and step_of(path) is None:
        refuse_older(path)
    checkpoint_of(path)


def verify(
    folder: AnyPath, show: Progress = lambda done, total: None
) -> tuple[Manifest | None, list[str]]:
    """Read every file of a checkpoint and compare it with the manifest; return that, if it is
    right, and problems.
    """
    try:
        manifest = read_manifest(folder)
    except CheckpointError as error:
        return None, [str(error)]
    return manifest, check_files(folder, manifest, progress=show)


def remove(paths: Sequence[AnyPath], force: bool = False) -> list[Entry]:
    """Delete checkpoints and leftovers; return those that were deleted.

    Raises CheckpointError, before anything is deleted, for what `force` overrides. These are pinned
    ones, saves that may be under way, and those of a newer format. All together are refused when no
    checkpoint that is good by its hashes would remain.
    """
    found = []
    for path in dict.fromkeys(map(_absolute, paths)):
        if not NAMES.fullmatch(path.name) or not path.exists():
            raise CheckpointError(f"{path} is no folder of a checkpoint (step-N)")
        found.append(inspect(path))
    if not force:
        _must_be_deletable(found)
    for entry in found:
        is_mark = entry.folder.name.startswith((PARTIAL, DELETED))
        delete(entry.folder if is_mark else unpublish(entry.folder))
    return found


def _must_be_deletable(found: Sequence[Entry]) -> None:
    """Raise CheckpointError for what `remove` deletes by force only."""
    for entry in found:
        if entry.pinned:
            raise CheckpointError(
                f"{entry.folder} is pinned: remove its file {PIN} first, or give --force"
            )
        if entry.state == NEWER:
            raise CheckpointError(
                f"{entry.reason}. It may be good: give --force to delete it all the same"
            )
        if entry.state == "partial":
            raise CheckpointError(
                f"{entry.folder} may be a save under way: give --force when no run writes there"
            )
    going: dict[AnyPath, list[Entry]] = {}
    for entry in found:
        going.setdefault(entry.folder.parent, []).append(entry)
    for root, entries_of_root in going.items():
        if any(entry.state == VALID for entry in entries_of_root):
            _must_leave_one(root, entries_of_root)


def _absolute(path: AnyPath) -> AnyPath:
    """Return an absolute path; of a checkpoint that is a link the link itself, not its target."""
    return path.parent.resolve() / path.name if isinstance(path, Path) else path


def _must_leave_one(root: AnyPath, going: Sequence[Entry]) -> None:
    """Raise CheckpointError unless a remaining checkpoint is good, by its hashes.

    If a full checkpoint goes, one of weights only does not count.
    """
    full = any(entry.manifest is not None and not entry.manifest.weights_only for entry in going)
    gone = [entry.folder for entry in going]
    for folder in (step_folder(root, step) for step in reversed(steps_in(root))):
        if folder in gone:
            continue
        manifest, problems = verify(folder, progress(say, f"{folder}: "))
        if not problems and not (full and manifest is not None and manifest.weights_only):
            return
    raise CheckpointError(
        f"{root} would be left without a good checkpoint. Nothing was removed; --force removes it "
        "anyway"
    )
