"""Checks of prepared token files: sizes and offsets at the start, hashes at a part's first read.

The hashes are compared in a background thread, at a low priority. A part counts as whole on this
machine once its hashes fit. A small file in the folder of the token cache tells that to all ranks
and later runs for 30 days. Its name follows from the part's files (path, size, times) and their
hashes. So a part that is replaced is checked again.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from titanlite.data import DataError
from titanlite.data.threads import Pool, ending
from titanlite.utils import not_a_link

#: Seconds for which a part counts as whole.
KEEP = 30 * 86400.0
#: Seconds between two looks at the lock of another process.
_WAIT = 0.1
#: The kind of hash in an index (XXH3 with 128 bits).
HASH = "xxh3:"
#: Bytes that are hashed at a time.
_BLOCK = 8 << 20
#: Offsets that are compared at once.
_OFFSETS = 1 << 22
#: For the threads that compare hashes: training goes first.
_NICE = 10
#: What to do about damaged parts.
REPAIR = "`titanlite data prepare` with the arguments that made the folder makes them again"


@dataclass(frozen=True)
class PartHashes:
    """The files of a part, and the hash of each in the index.

    Without hashes nothing can be compared.
    """

    hashes: Mapping[Path, str]
    #: Folder of the records of parts that are whole; None: none is kept.
    records: Path | None

    def record(self) -> Path | None:
        """Return the file that says that this part is whole.

        Raises OSError if the part is not there.
        """
        if self.records is None:
            return None
        stats = [
            (os.path.realpath(file), file.stat(), digest) for file, digest in self.hashes.items()
        ]
        decisive = [
            [path, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino, digest]
            for path, stat, digest in stats
        ]
        name = hashlib.sha256(json.dumps(decisive).encode()).hexdigest()[:32]
        return self.records / f"{name}.checked"

    def is_known(self) -> bool:
        """Return whether a record says that the part is whole."""
        with contextlib.suppress(OSError):
            file = self.record()
            return (
                file is not None
                and file.stat().st_size > 0
                and time.time() - file.stat().st_mtime < KEEP
            )
        return False

    def compare(self, read: Callable[[int], None] = lambda count: None) -> Path | None:
        """Return the first file whose content does not fit its hash; None if all do.

        read: gets the number of bytes of each block. Raises OSError if a file cannot be read, and
        ValueError for a kind of hash that is not known.
        """
        for file, expected in self.hashes.items():
            if not expected.startswith(HASH):
                raise ValueError(
                    f"{expected.partition(':')[0]!r} is a kind of hash that this titanlite does "
                    "not know"
                )
            if hash_of(file, read) != expected:
                return file
        return None

    def note(self) -> None:
        """Keep a record that the part is whole."""
        with contextlib.suppress(OSError):
            if file := self.record():
                with open(file, "wb", opener=not_a_link) as stream:
                    stream.write(b"whole\n")


def hash_of(file: Path, read: Callable[[int], None]) -> str:
    """Return the hash of a file's content, as an index has it.

    `read` is called with the number of bytes of each block.
    """
    # Only here: a config's check does without.
    import xxhash

    found = xxhash.xxh3_128()
    block = memoryview(bytearray(_BLOCK))
    with open(file, "rb", buffering=0) as stream:
        while count := stream.readinto(block):
            found.update(block[:count])
            read(count)
    return f"{HASH}{found.hexdigest()}"


class _EndingError(Exception):
    """The process ends."""


class HashCheck:
    """Compares the hashes of parts with those in their index, in the order in which they are first
    read.

    parts: by number. repair: what to do about a damaged part, for the error.
    """

    def __init__(self, parts: Sequence[PartHashes], repair: str) -> None:
        self._parts, self._repair = parts, repair
        self._begun: dict[int, Future[None]] = {}
        self._pool: Pool | None = None
        self._problem: DataError | None = None
        self._lock = threading.Lock()

    def begin(self, number: int) -> None:
        """Check a part, which is about to be read.

        Raises DataError if a part is found to be damaged.
        """
        if number not in self._begun:
            with self._lock:
                self._submit(number)
        self.raise_found()

    def raise_found(self) -> None:
        """Raise DataError if a part is found to be damaged."""
        if self._problem is not None:
            raise self._problem

    def settle(self, seconds: float) -> int:
        """Wait for the parts that are read; return how many are not checked after `seconds`.

        Raises DataError if a part is found to be damaged.
        """
        deadline = time.monotonic() + seconds
        left = [future for future in list(self._begun.values()) if not future.done()]
        while left and self._problem is None and time.monotonic() < deadline:
            time.sleep(0.01)
            left = [future for future in left if not future.done()]
        self.raise_found()
        return len(left)

    def _submit(self, number: int) -> None:
        if number in self._begun:
            return
        self._pool = self._pool or Pool(1, "titanlite-check")
        began = time.strftime("%Y-%m-%d %H:%M:%S")
        self._begun[number] = self._pool.submit(self._check, self._parts[number], began)

    def _check(self, part: PartHashes, began: str) -> None:
        _be_nice()
        try:
            damaged = _damaged(part)
        except _EndingError:
            return
        except (OSError, ValueError) as error:
            names = ", ".join(map(str, part.hashes))
            self._problem = DataError(f"{names} cannot be checked: {error}")
            return
        if damaged is not None:
            self._problem = DataError(
                f"{damaged} is damaged: its content does not fit its hash in index.json. It was "
                f"first read at {began}. Checkpoints saved since then may hold what it taught: go "
                f"on from an older one (checkpoint.load_step). {self._repair}"
            )


def _be_nice() -> None:
    """Lower the priority of this thread: Linux has one for each thread."""
    if sys.platform != "linux":
        return
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)


def _damaged(part: PartHashes) -> Path | None:
    """Return the damaged file of a part, or None; one process of this machine reads it, the others
    wait.
    """
    if not part.hashes or part.is_known():
        return None
    with _record_lock(part) as is_free:
        if not is_free or part.is_known():
            return None
        damaged = part.compare(_go_on)
        if damaged is None:
            part.note()
        return damaged


def _go_on(_: int) -> None:
    if ending.is_set():
        raise _EndingError


@contextlib.contextmanager
def _record_lock(part: PartHashes) -> Iterator[bool]:
    """Hold the lock of a part's record (True), or wait until another process has found the part
    whole (False).

    Without a folder for records there is no lock. Raises _EndingError when the process ends.
    """
    try:
        file = _open_record(part)
    except OSError:
        file = None
    if file is None:
        yield True
        return
    with file:
        while not _try_lock(file):
            if part.is_known():
                yield False
                return
            _go_on(0)
            time.sleep(_WAIT)
        yield True


def _open_record(part: PartHashes) -> BinaryIO | None:
    record = part.record()
    if record is None:
        return None
    record.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    return open(record, "ab", opener=not_a_link)


def _try_lock(file: BinaryIO) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return True  # a file system without locks: each process compares for itself
    return True


# At the start


def check_offsets(
    file: Path | str,
    offsets: NDArray[np.int64],
    tokens: int,
    remedy: str = "prepare the text again",
) -> None:
    """Check where documents begin in a part of so many tokens. offsets: [documents + 1].

    Raises DataError, naming the file and the place, unless they go from 0 to the end without going
    back.
    """
    if not len(offsets) or offsets[0] != 0 or offsets[-1] != tokens:
        ends = f"{offsets[0]:,} to {offsets[-1]:,}" if len(offsets) else "nowhere"
        raise DataError(
            f"{file} is damaged: it goes from {ends} instead of 0 to {tokens:,}; {remedy}"
        )
    for begin in range(0, len(offsets) - 1, _OFFSETS):
        piece = offsets[begin : begin + _OFFSETS + 1]
        back = np.flatnonzero(piece[1:] < piece[:-1])
        if len(back):
            place = begin + int(back[0])
            raise DataError(
                f"{file} is damaged: document {place} (from 0) begins at {offsets[place]:,} and "
                f"ends before that, at {offsets[place + 1]:,}; {remedy}"
            )


def check_part(folder: Path, part: Mapping[str, Any], item: int) -> None:
    """Check the record of a part in an index, and the sizes of its files. item: bytes of a token.

    Raises DataError if sizes do not fit; OSError if a file is not there.
    """
    name = str(part["name"])
    sizes = dict(part["bytes"])
    tokens = part["tokens"]
    documents = part["documents"]
    expected = {"tokens": tokens * item, "offsets": 8 * (documents + 1), "targets": -(-tokens // 8)}
    for suffix, size in sizes.items():
        file = folder / f"{name}.{suffix}"
        if size != expected[suffix]:
            raise DataError(
                f"{folder}: index.json says {size:,} bytes of {file.name} for {tokens:,} tokens "
                f"in {documents:,} documents; prepare the text again"
            )
        found = file.stat().st_size
        if found != size:
            raise DataError(f"{file} has {found:,} bytes instead of {size:,}; prepare it again")
