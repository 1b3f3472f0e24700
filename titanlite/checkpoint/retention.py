"""How a checkpoint is published and deleted, and which ones stay. No torch here.

A save marks the folder `step-N`, writes all files into it, and the manifest last (`begin`,
`publish`). A deletion renames the folder first. In a store, which cannot rename, it writes a mark
and removes the manifest (`unpublish`, `delete`). So a process killed at any moment leaves a whole
checkpoint, or a leftover for the next start or save. One rank does all this.

A user pins a checkpoint by a file KEEP: no run deletes it. A reader pins it by `pinned`.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING

from titanlite.checkpoint.manifest import (
    DELETED,
    FILE,
    PARTIAL,
    PIN,
    REASON,
    CheckpointError,
    Manifest,
    fault_of,
    marked_folder,
    parse_manifest,
    read_manifest,
    step_folder,
    steps_in,
)
from titanlite.checkpoint.store_paths import (
    AnyPath,
    StorePath,
    copy_folder,
    entries,
    files_in,
    remove_folder,
    sync_folder,
    write_new,
)
from titanlite.runs.symlink_checks import refuse_links
from titanlite.utils import atomic_write, logger

if TYPE_CHECKING:
    from titanlite.config.sections import Checkpoint

#: Seconds that a save waits for the deletion of leftovers.
_SETTLE_SECONDS = 300.0
#: How the name of a reader's pin begins, and the seconds that it counts.
_READING, _READ_SECONDS = ".reading-", 86_400.0


def clear_leftovers(root: AnyPath, step: int, deleter: Deleter) -> None:
    """Delete leftovers, whose space is needed, and all that has the place of `step`.

    The caller knows that no other process saves there. Raises CheckpointError when it takes too
    long.
    """
    final = step_folder(root, step)
    left = []
    for path in leftovers(root):
        if path.name.startswith(PARTIAL) or marked_folder(path) == final:
            left.append(path)
    if left and not deleter.wait(_SETTLE_SECONDS):
        raise CheckpointError(
            f"{root}: old checkpoints are still being deleted; nothing is written meanwhile"
        )
    # A store that forbids deletions is no reason not to save.
    _delete(left)


def begin(root: AnyPath, step: int, known_bad: Mapping[int, str] | None = None) -> AnyPath:
    """Return the empty folder `step-N`, which is no checkpoint before `publish`.

    An invalid checkpoint there, or one in `known_bad`, is quarantined. Raises CheckpointError for a
    valid one.
    """
    final = step_folder(root, step)
    if final.exists():
        fault = fault_of(final)
        reason = (known_bad or {}).get(step) or fault
        if not reason:
            raise CheckpointError(
                f"{final} already holds a valid checkpoint; it is not overwritten"
            )
        quarantine(final, reason)
    if isinstance(root, Path):
        root.mkdir(parents=True, exist_ok=True)
    _mark(PARTIAL, final)
    if isinstance(final, Path):
        final.mkdir()
    return final


def _mark_name(kind: str, folder: AnyPath) -> str:
    return f"{kind}{folder.name}-{uuid.uuid4().hex[:8]}"


def _mark(kind: str, folder: AnyPath) -> AnyPath:
    """Write the mark of a save or a deletion beside the folder.

    It is empty, for a full disk, and not made durable, which could take long. So after a crash of
    the machine a folder without a mark is reported, and not deleted.
    """
    mark = folder.parent / _mark_name(kind, folder)
    mark.write_bytes(b"")
    return mark


def publish(folder: AnyPath, manifest: Manifest) -> None:
    """Write the manifest, then remove the mark. Raises CheckpointError."""
    try:
        write_new(folder / FILE, manifest.to_json().encode())
    except FileExistsError:
        raise CheckpointError(
            f"{folder} already holds a checkpoint; it is not overwritten"
        ) from None
    # The mark of a published folder means nothing, and goes with the next save.
    with suppress(OSError):
        for mark in marks_of(folder):
            mark.unlink(missing_ok=True)
    sync_folder(folder.parent)


def unpublish(folder: AnyPath) -> AnyPath:
    """Make a folder no checkpoint; return its leftover, for `delete`."""
    if isinstance(folder, Path) and not folder.is_symlink():
        aside = folder.rename(folder.with_name(_mark_name(DELETED, folder)))
        sync_folder(folder.parent)
        return aside
    # A store that forbids deletions would get one more mark with each save.
    known = [mark for mark in marks_of(folder) if mark.name.startswith(DELETED)]
    mark = known[0] if known else _mark(DELETED, folder)
    if isinstance(folder, StorePath):
        (folder / FILE).unlink(missing_ok=True)
    else:
        # The target of a link belongs to someone else.
        folder.unlink()
    return mark


def is_pinned(folder: AnyPath) -> bool:
    """Return whether a folder holds something named KEEP, or a reader began lately."""
    since = time.time() - _READ_SECONDS
    for name, file in files_in(folder).items():
        if name.startswith(_READING) and file.st_mtime > since:
            return True
    return PIN in entries(folder)


@contextmanager
def pinned(folder: AnyPath) -> Iterator[None]:
    """Pin a checkpoint in the block, if it can be written to; a killed reader pins it for a day."""
    pin = folder / f"{_READING}{uuid.uuid4().hex}"
    with suppress(OSError):
        write_new(pin, b"")
    try:
        yield
    finally:
        with suppress(OSError):
            pin.unlink(missing_ok=True)


def leftovers(root: AnyPath) -> list[AnyPath]:
    """Return the marks of saves and deletions that are under way or were cut short.

    titanlite 0.1.0 made folders of such names, which hold the files themselves.
    """
    return [root / name for name in sorted(entries(root)) if name.startswith((PARTIAL, DELETED))]


def marks_of(folder: AnyPath) -> list[AnyPath]:
    """Return the marks that this folder is being deleted."""
    return [mark for mark in leftovers(folder.parent) if marked_folder(mark) == folder]


def leftover_folder(leftover: AnyPath) -> AnyPath | None:
    """Return the folder with the files of a leftover; None where it is a checkpoint."""
    folder = None if leftover.is_dir() else marked_folder(leftover)
    if folder is None:
        return leftover
    return None if (folder / FILE).is_file() else folder


def delete(leftover: AnyPath) -> None:
    """Delete a leftover with its files, but no checkpoint. Raises OSError."""
    folder = leftover_folder(leftover)
    if folder is not None and folder.is_dir():
        remove_folder(folder)
    leftover.unlink(missing_ok=True)


def quarantine(folder: AnyPath, reason: str) -> AnyPath:
    """Rename a checkpoint to `step-N.invalid-K`, with the reason in a file; return the new path.

    In a store it is copied and then deleted: a crash leaves the whole of one of them.
    """
    aside = _free_name(folder)
    content = f"{reason}\n".encode()
    if isinstance(folder, StorePath) and isinstance(aside, StorePath):
        copy_folder(folder, aside)
        (aside / REASON).write_bytes(content)
        delete(unpublish(folder))
    elif isinstance(folder, Path):
        with suppress(OSError):
            refuse_links(folder.parent, folder)
            atomic_write(folder / REASON, content)
        folder.rename(folder.with_name(aside.name))
        sync_folder(folder.parent)
    logger.warning(f"{folder} is now {aside.name}: {reason}")
    return aside


def _free_name(folder: AnyPath) -> AnyPath:
    names = entries(folder.parent)
    number = 0
    while f"{folder.name}.invalid-{number}" in names:
        number += 1
    return folder.parent / f"{folder.name}.invalid-{number}"


class Deleter:
    """Deletes leftovers in a thread: it may take longer than the other ranks would wait."""

    def __init__(self) -> None:
        self._threads: list[Thread] = []
        #: Each mark has its own name: no deletion begins twice.
        self._begun: set[AnyPath] = set()

    def delete(self, marks: Collection[AnyPath]) -> None:
        """Start the deletion. Leftovers that cannot be deleted stay for the next start."""
        new = [mark for mark in marks if mark not in self._begun]
        self._begun.update(new)
        if new:
            thread = Thread(target=_delete, args=(new,), name="titanlite-delete", daemon=True)
            thread.start()
            self._threads = [other for other in self._threads if other.is_alive()]
            self._threads.append(thread)

    def wait(self, seconds: float) -> bool:
        deadline = time.monotonic() + seconds
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)


def _delete(marks: list[AnyPath]) -> None:
    for mark in marks:
        with suppress(OSError):
            delete(mark)


# Which ones stay


def prune(
    root: AnyPath,
    newest: int,
    config: Checkpoint,
    keep: Collection[int] = (),
    known_bad: Collection[int] = (),
    fingerprints: dict[str, str] | None = None,
) -> list[AnyPath]:
    """Unpublish old checkpoints now that the one of step `newest` exists; return marks for
    `delete`.

    Only checkpoints of this run (by `fingerprints`, None: any) up to that step count, and only such
    go. Damaged ones take no place among the latest. These stay: the latest `keep_latest_k` (0:
    all), multiples of `keep_every`, milestones, and `keep`. So do pinned ones, those of weights
    only, and folders without a good manifest.

    The last one whose weights are known to give a finite loss stays. That is the newest if its loss
    was measured, else the one before it, which the steps since then have shown.

    Raises CheckpointError, and removes nothing, when the newest is not valid.
    """
    if not config.keep_latest_k:
        return []
    head = read_manifest(step_folder(root, newest))
    if head.weights_only:
        return []
    latest = config.keep_latest_k
    if head.validation_loss is None:
        latest = max(latest, 2)
    counted = {newest: head}
    for step in reversed(steps_in(root)):
        if step >= newest or step in known_bad:
            continue
        # The latest ones count only when they are whole. For the others only the manifest is read.
        read = read_manifest if len(counted) < latest else parse_manifest
        with suppress(CheckpointError):
            manifest = read(step_folder(root, step))
            if manifest.can_be_resumed_by(fingerprints):
                counted[step] = manifest
    stay = {*keep, *sorted(counted)[-latest:]}
    marks = []
    for step in sorted(counted.keys() - stay):
        folder = step_folder(root, step)
        if not config.stays(step) and not is_pinned(folder):
            marks.append(unpublish(folder))
    return marks
