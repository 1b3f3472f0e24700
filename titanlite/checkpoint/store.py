"""How a checkpoint comes into being and goes in an object store, where nothing can be renamed. No torch here.

A save puts its objects below `step-N/` and the manifest last, in one request: that is what makes it a checkpoint. What
goes loses its manifest first. Before either, an object beside the folder says so, under the name that the folder would
have in a file system (`.partial-step-N-…`, `.deleted-step-N-…`). While such a mark is there and no manifest, the folder
is nobody's: the next save or start deletes it.

A client that died may leave uploads that were never ended. They cost room and are seen nowhere; they go, too.
"""

from __future__ import annotations

import contextlib
import re
import time
import uuid
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor

from titanlite.checkpoint.place import StoreError, StorePath, modified

PARTIAL, DELETED = ".partial-", ".deleted-"
#: The object that makes a folder a checkpoint: `titanlite.checkpoint.manifest.FILE`.
_MARKER = "manifest.json"
_MARK = re.compile(r"\.(?:partial|deleted)-(.+)-[0-9a-f]{8}")
#: Objects that are copied within the store at the same time.
_THREADS = 8
#: Times that a store is asked to delete what it still shows.
_TRIES = 3


def folder_of(mark: StorePath) -> StorePath | None:
    """The folder that a mark is about; None for an object that is no mark."""
    match = _MARK.fullmatch(mark.name)
    return mark.parent / match.group(1) if match else None


def _marks(names: Iterable[str], root: StorePath) -> list[StorePath]:
    return sorted(root / name for name in names if _MARK.fullmatch(name))


def _new_mark(kind: str, folder: StorePath) -> StorePath:
    mark = folder.parent / f"{kind}{folder.name}-{uuid.uuid4().hex[:8]}"
    what = "a save" if kind == PARTIAL else "the deletion"
    mark.write_bytes(f"{what} of {folder.name}, under way or cut short\n".encode())
    return mark


def folders(root: StorePath) -> list[StorePath]:
    """The folders in `root`, without those that a save or a deletion is at work on or has left."""
    found = root.listing()
    unfinished = {folder_of(mark) for mark in _marks(found, root) if not _is_published(mark)}
    there = (root / name for name, entry in found.items() if entry["type"] == "directory")
    return [folder for folder in there if folder not in unfinished]


def is_mark(path: object) -> bool:
    """Whether there is such a mark."""
    return isinstance(path, StorePath) and folder_of(path) is not None and path.is_file()


def _is_published(mark: StorePath) -> bool:
    """Whether the folder of a mark has its manifest: the save had ended, or the deletion not begun."""
    folder = folder_of(mark)
    return folder is not None and (folder / _MARKER).is_file()


def leftovers(root: StorePath) -> list[StorePath]:
    """The marks in `root`: of saves and deletions under way, or cut short, also just before their own ends."""
    return _marks(root.listing(), root)


def unfinished(root: StorePath) -> list[StorePath]:
    """Those of the marks whose folders are no checkpoints."""
    return [mark for mark in leftovers(root) if not _is_published(mark)]


def tidy(root: StorePath) -> None:
    """Delete what saves and deletions have left. The caller knows that none is under way."""
    for mark in leftovers(root):
        with contextlib.suppress(StoreError):  # a store that forbids deletions is no reason not to save
            delete(mark)


def begin(folder: StorePath) -> StorePath:
    """Mark a folder, in which nothing is, for a save; the mark."""
    return _new_mark(PARTIAL, folder)


def publish(folder: StorePath, manifest: str) -> None:
    """The manifest, by which the folder becomes a checkpoint. Raises FileExistsError where there is one."""
    (folder / _MARKER).write_new(manifest.encode())
    with contextlib.suppress(StoreError):  # it says nothing any more, and the next save deletes it
        for mark in leftovers(folder.parent):
            if folder_of(mark) == folder:
                mark.unlink(missing_ok=True)


def set_aside(folder: StorePath) -> StorePath:
    """Make a folder no checkpoint any more; the mark, for `delete`."""
    if folder_of(folder) is not None:
        return folder
    mark = _new_mark(DELETED, folder)
    (folder / _MARKER).unlink(missing_ok=True)
    return mark


def put_back(mark: StorePath, manifest: bytes | None) -> None:
    """Undo `set_aside`, as long as nothing was deleted; None: there was no manifest."""
    folder = folder_of(mark)
    assert folder is not None, mark
    if manifest is not None:
        (folder / _MARKER).write_new(manifest)
    mark.unlink(missing_ok=True)


def delete(mark: StorePath) -> None:
    """What a mark is about, then the mark; the mark alone where the folder is a checkpoint."""
    folder = folder_of(mark)
    assert folder is not None, mark
    if not (folder / _MARKER).is_file():
        _empty(folder)
    mark.unlink(missing_ok=True)


def content(path: StorePath) -> tuple[int, float]:
    """Bytes of all objects of a folder, or of the folder that a mark is about, and when the latest was written."""
    entries = (folder_of(path) or path).listing(deep=True).values()
    return sum(entry["size"] for entry in entries), max(map(modified, entries), default=time.time())


def _empty(folder: StorePath) -> None:
    _end_uploads(folder)
    for _ in range(_TRIES):
        names = folder.listing(deep=True)
        if not names:
            return
        folder.remove(names)
    # Clients do not tell of objects that they may not delete.
    raise StoreError(f"{folder}: {len(names)} objects cannot be deleted, such as {min(names)}: are deletions allowed?")


def _end_uploads(folder: StorePath) -> None:
    """Those of large objects that a killed client has begun; for stores that let them be seen."""
    fs = folder.fs
    if not hasattr(fs, "list_multipart_uploads"):
        return
    bucket, _, prefix = folder.key.partition("/")
    with contextlib.suppress(Exception):  # a right that many are not given, and nothing that a save depends on
        for upload in fs.list_multipart_uploads(bucket):
            if upload["Key"].startswith(f"{prefix}/"):
                fs.abort_mpu(bucket, upload["Key"], upload["UploadId"])


def move_aside(folder: StorePath, file: str, reason: str) -> StorePath:
    """Copy a folder within the store, with a file that says why, then delete it; the copy.

    A crash leaves the whole of the one or of the other.
    """
    root = folder.parent
    taken = root.listing()
    aside = next(root / name for i in range(10**6) if (name := f"{folder.name}.invalid-{i}") not in taken)
    mark = _new_mark(PARTIAL, aside)
    names = sorted(folder.listing(deep=True), key=lambda name: name == _MARKER)
    with ThreadPoolExecutor(_THREADS, thread_name_prefix="titanlite-copy") as pool:
        list(pool.map(lambda name: (folder / name).copy_to(aside / name), names))
    (aside / file).write_bytes(f"{reason}\n".encode())
    mark.unlink(missing_ok=True)
    delete(set_aside(folder))
    return aside
