"""Which checkpoints may go, and how one goes. No torch here; one rank only.

A folder is renamed first, to a name that no checkpoint has, and then deleted: a crash in between leaves a folder that
nobody can take for a checkpoint, and the next start deletes the rest of it.
"""

from __future__ import annotations

import shutil
import time
import uuid
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from threading import Thread
from typing import Literal

from titanlite.checkpoint import store
from titanlite.checkpoint.manifest import (
    FILE,
    CheckpointError,
    Manifest,
    is_pinned,
    is_valid,
    make_way,
    parse_manifest,
    read_manifest,
    step_folder,
    steps_in,
    sync_folder,
)
from titanlite.checkpoint.place import Place, StorePath

#: A save that was not finished.
PARTIAL = store.PARTIAL
#: A checkpoint that is being deleted.
DELETED = store.DELETED
#: Seconds that a save waits for deletions where names are not changed before.
_SETTLE_SECONDS = 300.0

#: Steps whose checkpoints stay for good: those of a list, or 1, 2, 4, 8, …
Milestones = Literal["powers_of_two"] | tuple[int, ...]


def is_milestone(step: int, milestones: Milestones) -> bool:
    if milestones == "powers_of_two":
        return step > 0 and step & (step - 1) == 0
    return step in milestones


def surplus(
    steps: Sequence[int], latest: int, every: int = 0, keep: Collection[int] = (), milestones: Milestones = ()
) -> list[int]:
    """Those of the valid checkpoints at `steps` that may go, ascending.

    latest: how many of the newest stay; 0: all. every: multiples of it stay; 0: none for this reason. keep: stay too,
    and so do milestones. The newest is never among them.
    """
    if latest < 1:
        return []
    older = sorted(steps)[:-latest]
    return [
        step
        for step in older
        if step not in keep and not (every and step % every == 0) and not is_milestone(step, milestones)
    ]


def retire(
    root: Place,
    newest: int,
    latest: int,
    every: int = 0,
    keep: Collection[int] = (),
    known_bad: Collection[int] = (),
    fingerprints: dict[str, str] | None = None,
    milestones: Milestones = (),
    best: int = 0,
) -> list[Place]:
    """Rename what is no longer wanted now that the checkpoint of step `newest` is there; the folders to delete.

    Only checkpoints of this run (by `fingerprints`, None: any) up to that step are counted, and only such go. One whose
    files are not whole takes no place among the latest; a folder without a good manifest stays for a person to look at,
    and so does one of weights only, which no run could go on from. best: how many of those with the lowest validation
    loss stay.

    The last one whose weights are known to give a finite loss stays. That is the newest if its loss was measured
    (`Manifest.validation_loss`), else the one before it: the steps since then have shown it.

    Raises CheckpointError, and renames nothing, when the newest is not valid.
    """
    if latest < 1:
        return []
    head = read_manifest(step_folder(root, newest))
    if head.weights_only:
        return []
    valid = {newest: head}
    latest = max(latest, 1 if head.validation_loss is not None else 2)
    for step in reversed([step for step in steps_in(root) if step < newest and step not in known_bad]):
        # What stays counts only when it is whole; of what goes, no more than its manifest is read.
        read = read_manifest if len(valid) < latest else parse_manifest
        try:
            manifest = read(step_folder(root, step))
        except CheckpointError:
            continue
        if not manifest.weights_only and (fingerprints is None or manifest.fingerprints == fingerprints):
            valid[step] = manifest
    gone = []
    for step in surplus(list(valid), latest, every, {*keep, *best_steps(root, valid, best)}, milestones):
        if (aside := take(step_folder(root, step))) is not None:
            gone.append(aside)
    if gone:
        sync_folder(root)
    return gone


def best_steps(root: Place, manifests: dict[int, Manifest], count: int) -> list[int]:
    """The whole ones with the lowest validation loss, at most `count`, the best first; of equal ones the earlier."""
    losses = sorted((m.validation_loss, step) for step, m in manifests.items() if m.validation_loss is not None)
    found: list[int] = []
    for _, step in losses:
        if len(found) >= count:
            break
        if is_valid(step_folder(root, step)):
            found.append(step)
    return found


def begin(root: Place, step: int, known_bad: Mapping[int, str], deleter: Deleter) -> Place:
    """The folder to write the checkpoint of `step` into, which is none before `publish`. One rank only.

    Raises CheckpointError in a store, where the folder has its name from the beginning, when there is a valid one.
    """
    if isinstance(root, StorePath):
        # What goes may have the names of what comes.
        if not deleter.wait(_SETTLE_SECONDS):
            raise CheckpointError(f"{root}: old checkpoints are still being deleted; nothing is written meanwhile")
        final = root / f"step-{step}"
        store.tidy(root)
        make_way(final, known_bad.get(step))
        store.begin(final)
        return final
    root.mkdir(parents=True, exist_ok=True)
    for stale in root.glob(f"{PARTIAL}*"):
        delete(stale, ignore_errors=True)  # left by a save that failed or was killed; its space is needed
    # Another name each time: what is left of an earlier one may still be being deleted.
    partial = root / f"{PARTIAL}step-{step}-{uuid.uuid4().hex[:8]}"
    partial.mkdir()
    return partial


def take(folder: Place) -> Place | None:
    """As `set_aside`, but None where the checkpoint is pinned, also at the last moment: then it stays, or is back."""
    if is_pinned(folder):
        return None
    manifest = None
    if isinstance(folder, StorePath):
        with suppress(FileNotFoundError):
            manifest = (folder / FILE).read_bytes()
    aside = set_aside(folder)
    if not is_pinned(folder if isinstance(folder, StorePath) else aside):
        return aside
    if isinstance(aside, StorePath):
        store.put_back(aside, manifest)
    else:
        assert isinstance(folder, Path)
        aside.rename(folder)
    return None


def set_aside(folder: Place) -> Place:
    """Give a folder a name that no checkpoint has; that name. In a store that of a mark, see there."""
    if isinstance(folder, StorePath):
        return store.set_aside(folder)
    name = f"{DELETED}{folder.name.lstrip('.')}"
    names = (folder.with_name(f"{name}.{i}" if i else name) for i in range(10**6))
    aside = next(path for path in names if not path.exists())
    folder.rename(aside)
    return aside


def leftovers(root: Place) -> Sequence[Place]:
    """Folders of saves and deletions that a crash has cut short; in a store their marks."""
    if isinstance(root, StorePath):
        return store.leftovers(root)
    return sorted([*root.glob(f"{PARTIAL}*"), *root.glob(f"{DELETED}*")])


class Deleter:
    """Deletes folders in a thread of its own: a large one may take longer than the other ranks would wait."""

    def __init__(self) -> None:
        self._threads: list[Thread] = []

    def delete(self, folders: Sequence[Place]) -> None:
        """What cannot be deleted stays, under its name, for the next start."""
        if folders:
            thread = Thread(target=_delete, args=(list(folders),), name="titanlite-delete", daemon=True)
            thread.start()
            self._threads = [t for t in self._threads if t.is_alive()] + [thread]

    def wait(self, seconds: float) -> bool:
        """Until all is deleted, at most so long; whether it is."""
        deadline = time.monotonic() + seconds
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)


def _delete(folders: list[Place]) -> None:
    for folder in folders:
        with suppress(OSError):
            delete(folder, ignore_errors=True)


def delete(folder: Place, ignore_errors: bool = False) -> None:
    """Delete what `set_aside` or `leftovers` has named. Raises OSError; with `ignore_errors` all that goes, goes."""
    if isinstance(folder, StorePath):
        store.delete(folder)
    elif folder.is_symlink():  # its target belongs to someone else
        folder.unlink()
    else:
        shutil.rmtree(folder, ignore_errors=ignore_errors)
