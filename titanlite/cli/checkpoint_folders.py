"""Folders of checkpoints: what is in them, which one is meant, and whether its files are right."""

from __future__ import annotations

import re
from contextlib import suppress
from dataclasses import dataclass

from titanlite.checkpoint.errors import CheckpointError, NewerFormatError
from titanlite.checkpoint.hf_files import holds_adapters, holds_weights
from titanlite.checkpoint.manifest import (
    DELETED,
    FILE,
    NAMES,
    PARTIAL,
    REASON,
    Manifest,
    Progress,
    check_files,
    find,
    read_manifest,
    refuse_older,
    root_of,
    step_folder,
    step_of,
)
from titanlite.checkpoint.retention import (
    is_pinned,
    leftover_folder,
    leftovers,
)
from titanlite.checkpoint.store_paths import AnyPath, entries, files_in, to_path

VALID = "valid"
INVALID = "invalid"
NEWER = "newer format"
PARTIAL_SAVE = "partial"


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
    """Return the state of a folder or mark, by name, manifest and sizes."""
    manifest = None
    reason = ""
    state = VALID
    folder = path
    if path.name.startswith((PARTIAL, DELETED)):
        state = PARTIAL_SAVE if path.name.startswith(PARTIAL) else "being deleted"
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
    """Return `path`, or the newest valid checkpoint in it. Raises CheckpointError."""
    path = to_path(path)
    if step_of(path) is not None or (path / FILE).is_file():
        if not path.is_dir():
            raise CheckpointError(f"{path}: no such checkpoint")
        return path
    root = root_of(path)
    return step_folder(root, find(root).valid(root).step)


def check_weights(path: AnyPath) -> None:
    """Raise CheckpointError for a path without weights; no torch, and contents are not read."""
    if path.is_dir() and (holds_weights(path) or holds_adapters(path)):
        return
    if path.is_dir() and step_of(path) is None:
        refuse_older(path)
    checkpoint_of(path)


def verify(
    folder: AnyPath, show: Progress = lambda done, total: None
) -> tuple[Manifest | None, list[str]]:
    """Compare each file with the manifest; return that, if it is right, and problems."""
    try:
        manifest = read_manifest(folder)
    except CheckpointError as error:
        return None, [str(error)]
    return manifest, check_files(folder, manifest, progress=show)
