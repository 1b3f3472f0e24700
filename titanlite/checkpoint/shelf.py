"""What lies in a folder of checkpoints, and how to take something from it: `titanlite checkpoint`. No torch here."""

from __future__ import annotations

import functools
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from titanlite.checkpoint import store
from titanlite.checkpoint.integrity import Progress, check_files
from titanlite.checkpoint.manifest import (
    FILE,
    PIN,
    REASON,
    CheckpointError,
    Manifest,
    NewerFormatError,
    find,
    folders_in,
    is_pinned,
    read_manifest,
    step_of,
    steps_in,
)
from titanlite.checkpoint.place import Place, StorePath, place
from titanlite.checkpoint.retention import DELETED, PARTIAL, delete, set_aside, take

VALID, INVALID, NEWER = "valid", "invalid", "newer format"
_ASIDE = re.compile(r"step-(\d+)\.invalid-\d+")
_STEP_WITHIN = re.compile(r"step-(\d+)")
#: In the folder of a run, unless `checkpoint.folder` says otherwise.
_IN_RUN = "checkpoint"


@dataclass(frozen=True)
class Entry:
    """One folder among the checkpoints."""

    folder: Place
    #: "valid", "invalid", "newer format" (of a later titanlite), "set aside" (an invalid one that a later save of its
    #: step made way for), "partial" (a save under way or cut short) or "being deleted".
    state: str
    #: Why it is not valid.
    reason: str = ""
    pinned: bool = False
    manifest: Manifest | None = None
    #: Bytes on the disk.
    size: int = 0
    #: Seconds since the epoch.
    written: float = 0.0

    @property
    def step(self) -> int:
        match = _STEP_WITHIN.search(self.folder.name)
        return int(match.group(1)) if match else -1

    @property
    def words(self) -> str:
        more = ", weights only" if self.manifest is not None and self.manifest.weights_only else ""
        return f"{self.state}{more}{', pinned' if self.pinned else ''}"


def root_of(path: Place) -> Place:
    """The folder of checkpoints that is meant: `path`, or `checkpoint` in it. Raises CheckpointError."""
    if not path.is_dir():
        raise CheckpointError(f"{path}: no such folder")
    roots: tuple[Place, Place] = (path, path / _IN_RUN)
    for root in roots:
        if root.is_dir() and any(map(_state_by_name, root.iterdir())):
            return root
    raise CheckpointError(f"{path} holds no checkpoints, nor does a folder {_IN_RUN!r} in it: name a run or its folder")


def checkpoint_of(path: Place | str) -> Place:
    """The checkpoint that is meant: `path`, or the newest valid one of its folder. Raises CheckpointError."""
    path = place(path)
    if step_of(path) is not None or (path / FILE).is_file():
        if not path.is_dir():
            raise CheckpointError(f"{path}: no such checkpoint")
        return path
    root = root_of(path)
    manifest, passed = find(root)
    if manifest is None:
        raise CheckpointError(f"{root} has no valid checkpoint" + "".join(f"\n  {reason}" for reason in passed))
    return root / f"step-{manifest.step}"


def _state_by_name(folder: Place) -> str | None:
    """What a folder's name says of it; None for what is none of ours."""
    if step_of(folder) is not None:
        return VALID
    if _ASIDE.fullmatch(folder.name):
        return "set aside"
    if folder.name.startswith(PARTIAL):
        return "partial"
    return "being deleted" if folder.name.startswith(DELETED) else None


def look(folder: Place) -> Entry:
    """What a folder is, by its name, its manifest and the sizes of its files."""
    state = _state_by_name(folder) or INVALID
    manifest, reason = None, ""
    if state == VALID:
        try:
            manifest = read_manifest(folder)
        except CheckpointError as error:
            state, reason = NEWER if isinstance(error, NewerFormatError) else INVALID, str(error)
    elif (folder / REASON).is_file():
        reason = (folder / REASON).read_text(encoding="utf-8", errors="replace").rstrip()
    try:
        size, written = _content(folder)
        written = manifest.created if manifest else written
    except FileNotFoundError:  # it is being written or deleted right now
        size, written = 0, time.time()
    return Entry(folder, state, reason, is_pinned(folder), manifest, size, written)


def _content(folder: Place) -> tuple[int, float]:
    """Bytes, and the time of the latest change."""
    if isinstance(folder, StorePath):
        return store.content(folder)
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    return size, folder.stat().st_mtime


def shelf(root: Place) -> list[Entry]:
    """All that a folder of checkpoints holds, by step."""
    folders = [path for path in folders_in(root) if _state_by_name(path)]
    if isinstance(root, StorePath):
        folders += store.unfinished(root)
    return sorted(map(look, folders), key=lambda entry: (entry.step, entry.folder.name))


@dataclass(frozen=True)
class Verdict:
    """What a full reading of a checkpoint has found."""

    folder: Place
    problems: tuple[str, ...]
    manifest: Manifest | None
    seconds: float
    #: Files in the folder that are not of the checkpoint.
    strangers: tuple[str, ...] = ()


def verify(folder: Place, progress: Progress = lambda done, total: None) -> Verdict:
    """Read every file of a checkpoint and compare with its manifest."""
    started = time.perf_counter()
    try:
        manifest = read_manifest(folder)
    except CheckpointError as error:
        return Verdict(folder, (str(error),), None, time.perf_counter() - started)
    problems = tuple(check_files(folder, manifest, progress=progress))
    ours = {*manifest.files, FILE, PIN, REASON}
    strangers = tuple(sorted(path.name for path in folder.iterdir() if path.name not in ours))
    return Verdict(folder, problems, manifest, time.perf_counter() - started, strangers)


def _resolved(path: Place) -> Place:
    """An absolute path; of a checkpoint that is a link the link itself, not the folder that it names."""
    path = place(path)
    is_link = not isinstance(path, StorePath) and path.is_symlink()
    return path.parent.resolve() / path.name if is_link else path.resolve()


def remove(
    paths: Sequence[Place],
    force: bool = False,
    dry_run: bool = False,
    progress: Callable[[str, int, int], None] = lambda what, done, total: None,
) -> list[Entry]:
    """Delete folders of checkpoints; what was (or, with `dry_run`, would be) deleted.

    progress: told, of those that stay, what is read to be sure that it is good: what, bytes done, of how many.

    Raises CheckpointError, before anything is deleted, for what is no checkpoint's folder and, unless `force`, for
    pinned ones, for saves that may be under way, and when no good checkpoint would be left where there was one.
    One that is pinned meanwhile stays, and raises then.
    """
    entries = []
    for path in dict.fromkeys(map(_resolved, paths)):
        if not (path.is_dir() or store.is_mark(path)) or _state_by_name(path) is None:
            raise CheckpointError(f"{path} is no folder of a checkpoint (step-N)")
        entries.append(look(path))
    if not force:
        for entry in entries:
            if entry.pinned:
                raise CheckpointError(f"{entry.folder} is pinned: remove its file {PIN} first, or give --force")
            if entry.state == NEWER:
                raise CheckpointError(f"{entry.reason}. It may be good: give --force to delete it all the same")
            if entry.state == "partial":
                raise CheckpointError(f"{entry.folder} may be a save under way: give --force when no run writes there")
        for root in dict.fromkeys(entry.folder.parent for entry in entries if entry.state == VALID):
            _must_leave_one(root, [entry for entry in entries if entry.folder.parent == root], progress)
    if not dry_run:
        for entry in entries:
            aside = set_aside(entry.folder) if force else take(entry.folder)
            if aside is None:
                raise CheckpointError(f"{entry.folder} was pinned at this moment: it stays")
            delete(aside)
    return entries


def _must_leave_one(root: Place, entries: Sequence[Entry], progress: Callable[[str, int, int], None]) -> None:
    """Raises CheckpointError unless a checkpoint that stays is good, by its hashes.

    Where one goes that a run can go on from, one of weights only does not do.
    """
    going = [entry.folder for entry in entries]
    full = any(entry.manifest is not None and not entry.manifest.weights_only for entry in entries)
    reasons = []
    for step in reversed(steps_in(root)):
        folder = root / f"step-{step}"
        if folder in going:
            continue
        found = verify(folder, functools.partial(progress, f"{folder}: "))
        if full and found.manifest is not None and found.manifest.weights_only:
            reasons.append(f"\n  {folder} holds weights only")
            continue
        if not found.problems:
            return
        reasons.append(f"\n  {found.problems[0]}")
    raise CheckpointError(
        f"{root} would be left without a good checkpoint{''.join(reasons)}\n"
        "Nothing was removed; --force removes it anyway"
    )
