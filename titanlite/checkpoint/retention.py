"""How a checkpoint is published and deleted, and which ones stay. No torch here.

A save marks the folder `step-N`, writes all files into it, and the manifest last (`begin`,
`publish`). A deletion renames the folder first. In a store, which cannot rename, it writes a mark
and removes the manifest (`unpublish`, `delete`). So a process killed at any moment leaves a whole
checkpoint, or a leftover for the next start or save. One rank does all this.

A user may pin a checkpoint at any moment, also while it is being deleted: by a file KEEP. In a
folder either that file comes first and the checkpoint stays, or the file cannot be made any more
(`_forbid_pin`). A store accepts an object at any time; there the deletion looks twice, and writes
the manifest back.
"""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
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
from titanlite.checkpoint.milestones import is_milestone
from titanlite.checkpoint.paths import (
    AnyPath,
    StorePath,
    copy_folder,
    entries,
    remove_folder,
    sync_folder,
    write_new,
    write_whole,
)
from titanlite.checkpoint.pin import is_over
from titanlite.runs.links import refuse_links
from titanlite.utils import atomic_write, logger

if TYPE_CHECKING:
    from titanlite.config.sections import Checkpoint

#: Seconds that a save waits for the deletion of leftovers.
_SETTLE_SECONDS = 300.0


def clear_leftovers(root: AnyPath, step: int, deleter: Deleter) -> None:
    """Delete leftovers of other saves, whose space is needed, and all that has the place of `step`.

    The caller knows that no other process is saving there. Raises CheckpointError when the deletion
    takes too long.
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
    """Return the empty folder `step-N` to write the checkpoint of `step` into, which is none before
    `publish`.

    An invalid checkpoint of that step, or one in `known_bad`, is quarantined. Raises
    CheckpointError for a valid one.
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


def _mark_path(kind: str, folder: AnyPath) -> AnyPath:
    return folder.parent / f"{kind}{folder.name}-{uuid.uuid4().hex[:8]}"


def _mark(kind: str, folder: AnyPath) -> AnyPath:
    """Write the mark of a save or a deletion beside the folder.

    It is empty: a full disk has room for that.

    It is not made durable, which could take long beside a save. So after a crash of the machine a
    folder without a mark is reported, and not deleted.
    """
    mark = _mark_path(kind, folder)
    mark.write_bytes(b"")
    return mark


def publish(folder: AnyPath, manifest: Manifest) -> None:
    """Write the manifest, which makes the folder a checkpoint, then remove the mark.

    Raises CheckpointError.
    """
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


def republish(folder: AnyPath, edit: Callable[[Manifest], Manifest]) -> None:
    """Write the manifest of a checkpoint anew, as `edit` returns it: a reader sees the old one or
    the new. Raises CheckpointError and OSError.
    """
    content = edit(parse_manifest(folder)).to_json().encode()
    write_whole(folder / FILE, content)
    sync_folder(folder)


def unpublish(folder: AnyPath, pinned_too: bool = False) -> AnyPath | None:
    """Make a folder no checkpoint any more; return its leftover, for `delete`.

    None: it is pinned, and stays.
    """
    if isinstance(folder, StorePath):
        return _unpublish_object(folder, pinned_too)
    if folder.is_symlink():
        mark = _mark(DELETED, folder)
        # Its target belongs to someone else.
        folder.unlink()
        return mark
    aside = _mark_path(DELETED, folder)
    assert isinstance(aside, Path)
    folder.rename(aside)
    sync_folder(folder.parent)
    if pinned_too or _forbid_pin(aside):
        return aside
    _put_back(aside)
    return None


def _unpublish_object(folder: StorePath, pinned_too: bool) -> AnyPath | None:
    """Do `unpublish` in a store.

    The mark holds the manifest: a checkpoint that is pinned meanwhile gets it back.
    """
    try:
        content = (folder / FILE).read_bytes()
    except FileNotFoundError:
        content = b""
    # A store that forbids deletions would get one more mark with each save.
    known = [mark for mark in marks_of(folder) if mark.name.startswith(DELETED)]
    mark = known[0] if known else _mark_path(DELETED, folder)
    mark.write_bytes(content)
    (folder / FILE).unlink(missing_ok=True)
    if not pinned_too and _put_back(mark):
        return None
    return mark


#: Where a name KEEP that this module makes leads to: a place in a folder that does not exist.
_NOWHERE = "being-deleted/nothing"


def is_pinned(folder: AnyPath) -> bool:
    """Return whether a folder holds something named KEEP that this module did not make.

    That of a process which has ended does not count.
    """
    pin = folder / PIN
    if isinstance(pin, StorePath):
        return pin.is_file() and not is_over(pin)
    return os.path.lexists(pin) and not _is_forbidden(pin) and not is_over(pin)


def _is_forbidden(pin: Path) -> bool:
    return pin.is_symlink() and os.readlink(pin) == _NOWHERE


def _forbid_pin(folder: Path) -> bool:
    """Take the name KEEP in a renamed folder, so that no other process can use it.

    Return False where it is in use.

    A process that found the folder under its old name can still make a file in it, over NFS for
    seconds. A link takes the name in one atomic step. It leads nowhere, so that `touch` fails too.
    """
    pin = folder / PIN
    try:
        pin.symlink_to(_NOWHERE)
    except FileExistsError:
        if is_over(pin):
            pin.unlink(missing_ok=True)
            return _forbid_pin(folder)
        return _is_forbidden(pin)
    except OSError:
        # A file system without links.
        return not is_pinned(folder)
    return True


def _put_back(leftover: AnyPath) -> bool:
    """Make a leftover of a deletion a checkpoint again if it is pinned; return whether it is.

    Raises OSError.
    """
    folder = marked_folder(leftover)
    if folder is None or not leftover.name.startswith(DELETED):
        return False
    if isinstance(leftover, Path) and isinstance(folder, Path):
        if not leftover.is_dir() or not is_pinned(leftover):
            return False
        leftover.rename(folder)
        sync_folder(folder.parent)
    elif not _put_back_object(leftover, folder):
        return False
    logger.warning(f"{folder} is not deleted: its file {PIN} came while the deletion began")
    return True


def _put_back_object(mark: AnyPath, folder: AnyPath) -> bool:
    """Write the manifest in a store's mark back if the folder is pinned and whole; return whether
    it was.
    """
    if not is_pinned(folder):
        return False
    content = mark.read_bytes()
    if not content:
        return False
    write_new(folder / FILE, content)
    if fault_of(folder):
        # A part of it is gone already.
        (folder / FILE).unlink()
        return False
    mark.unlink(missing_ok=True)
    return True


def put_back_pinned(root: AnyPath) -> None:
    """Make pinned checkpoints again of leftovers of a deletion that was killed as it began.

    Raises OSError.
    """
    for leftover in leftovers(root):
        _put_back(leftover)


def leftovers(root: AnyPath) -> list[AnyPath]:
    """Return the marks of saves and deletions that are under way or were cut short.

    titanlite 0.1.0 made folders of such names instead, which hold the files themselves.
    """
    return [root / name for name in sorted(entries(root)) if name.startswith((PARTIAL, DELETED))]


def marks_of(folder: AnyPath) -> list[AnyPath]:
    """Return the marks that say that this folder is being deleted."""
    return [mark for mark in leftovers(folder.parent) if marked_folder(mark) == folder]


def leftover_folder(leftover: AnyPath) -> AnyPath | None:
    """Return the folder that holds the files of a leftover; None where its folder is a
    checkpoint.
    """
    folder = None if leftover.is_dir() else marked_folder(leftover)
    if folder is None:
        return leftover
    return None if (folder / FILE).is_file() else folder


def delete(leftover: AnyPath, pinned_too: bool = False) -> bool:
    """Delete a leftover with its files; return whether it is gone.

    A checkpoint, or a pinned one, stays.

    Raises OSError.
    """
    folder = leftover_folder(leftover)
    if folder is not None and folder.is_dir():
        if not pinned_too and _stays(leftover, folder):
            return False
        remove_folder(folder, last=PIN)
    leftover.unlink(missing_ok=True)
    return True


def _stays(leftover: AnyPath, folder: AnyPath) -> bool:
    """Return whether the folder of a deletion is pinned; then it is a checkpoint again, where that
    can be.
    """
    if not leftover.name.startswith(DELETED):
        # Of a save that has not ended: nothing can be loaded from it.
        return False
    if folder == leftover and isinstance(folder, Path):
        if _forbid_pin(folder):
            return False
        _put_back(leftover)
        return True
    return _put_back(leftover)


def quarantine(folder: AnyPath, reason: str) -> AnyPath:
    """Rename a checkpoint that must not be loaded to `step-N.invalid-K`, with the reason in a file;
    the new path.

    In a store it is copied and then deleted: a crash leaves the whole of one of them.
    """
    aside = _free_name(folder)
    content = f"{reason}\n".encode()
    if isinstance(folder, StorePath) and isinstance(aside, StorePath):
        _move_objects(folder, aside, content)
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


def _move_objects(folder: StorePath, aside: StorePath, reason: bytes) -> None:
    """Copy a checkpoint in a store to another name, then delete it; a pin is copied too."""
    begun = _mark(PARTIAL, aside)
    copy_folder(folder, aside, last=FILE)
    (aside / REASON).write_bytes(reason)
    begun.unlink(missing_ok=True)
    mark = unpublish(folder, pinned_too=True)
    assert mark is not None
    delete(mark, pinned_too=True)


class Deleter:
    """Deletes leftovers in a separate thread: a large one may take longer than the other ranks
    would wait.
    """

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
        """Wait until all is deleted, at most so long; return whether it is."""
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

    Only checkpoints of this run (by `fingerprints`, None: any) up to that step are counted, and
    only such go. One whose files are not whole takes no place among the latest. These stay: the
    latest `keep_latest_k` (0: all), multiples of `keep_every`, milestones, the `keep_best` of
    lowest validation loss on each held-out text that the run had, `keep`, pinned ones, and folders
    without a good manifest. Checkpoints of weights only stay too: no run could resume from them.

    The last one whose weights are known to give a finite loss stays. That is the newest if its loss
    was measured (`Manifest.validation_loss`), else the one before it: the steps since then have
    shown it.

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
    older = [step for step in steps_in(root) if step < newest and step not in known_bad]
    counted = {newest: head, **_resumable(root, older, latest - 1, fingerprints)}
    stay = {*keep, *sorted(counted)[-latest:], *_best(root, counted, config.keep_best)}
    for step in counted:
        is_multiple = config.keep_every > 0 and step % config.keep_every == 0
        if is_multiple or is_milestone(step, config.milestones):
            stay.add(step)
    marks = []
    for step in sorted(counted.keys() - stay):
        folder = step_folder(root, step)
        mark = None if is_pinned(folder) else unpublish(folder)
        if mark is not None:
            marks.append(mark)
    return marks


def _resumable(
    root: AnyPath, steps: Sequence[int], latest: int, fingerprints: Mapping[str, str] | None
) -> dict[int, Manifest]:
    """Return the checkpoints of this run by step, newest first.

    The `latest` ones stay: they count only when they are whole. Of others the manifest alone is
    read.
    """
    found: dict[int, Manifest] = {}
    for step in reversed(steps):
        read = read_manifest if len(found) < latest else parse_manifest
        with suppress(CheckpointError):
            manifest = read(step_folder(root, step))
            if manifest.can_be_resumed_by(fingerprints):
                found[step] = manifest
    return found


def _best(root: AnyPath, valid: Mapping[int, Manifest], count: int) -> set[int]:
    """Return the `count` steps of lowest validation loss on each held-out text; of equal losses the
    earlier.
    """
    losses = []
    for step, manifest in valid.items():
        if manifest.validation_loss is not None:
            losses.append((manifest.validation_loss, step))
    best: dict[str, list[int]] = {}
    for _, step in sorted(losses):
        found = best.setdefault(valid[step].held_out, [])
        if len(found) < count and not fault_of(step_folder(root, step)):
            found.append(step)
    return {step for found in best.values() for step in found}
