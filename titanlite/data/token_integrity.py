"""Checks of prepared token files: sizes and offsets at the start, hashes at a part's first read.

The first rank of a machine compares the hashes in a background thread. A part counts as whole on
this machine once its hashes fit. A small file in the folder of the token cache tells that to later
runs for 30 days. Its name follows from the part's files (path, size, times) and their hashes. So a
part that is replaced is checked again.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from titanlite.data import DataError
from titanlite.data.daemon_threads import Pool, ending
from titanlite.utils import not_a_link

#: Seconds for which a part counts as whole.
KEEP = 30 * 86400.0
#: The kind of hash in an index (XXH3 with 128 bits).
HASH = "xxh3:"
#: Bytes that are hashed at a time.
_BLOCK = 8 << 20
#: Offsets that are compared at once.
_OFFSETS = 1 << 22
#: Remedy for damaged parts.
_REPAIR = "`titanlite data prepare` with the arguments that made the folder makes them again"


@dataclass(frozen=True)
class PartHashes:
    """The files of a part, and their hashes in the index, if any."""

    hashes: Mapping[Path, str]
    #: Folder of the records of parts that are whole; None: none is kept.
    records: Path | None = None

    def is_known(self) -> bool:
        """Return whether a record says that the part is whole."""
        with contextlib.suppress(OSError):
            if record := self._record():
                about = record.stat()
                return about.st_size > 0 and time.time() - about.st_mtime < KEEP
        return False

    def compare(self) -> None:
        """Compare all files with their hashes, and keep a record that the part is whole.

        Raises DataError for a difference, OSError if a file cannot be read.
        """
        for file, expected in self.hashes.items():
            if hash_of(file) != expected:
                raise DataError(
                    f"{file} is damaged: its content does not fit its hash in index.json"
                )
        with contextlib.suppress(OSError):
            if record := self._record():
                record.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                with open(record, "wb", opener=not_a_link) as stream:
                    stream.write(b"whole\n")

    def _record(self) -> Path | None:
        """Raises OSError if the part is not there."""
        if self.records is None or not self.hashes:
            return None
        decisive: list[list[Any]] = []
        for file, digest in self.hashes.items():
            stat = file.stat()
            times = stat.st_mtime_ns, stat.st_ctime_ns
            decisive.append([os.path.realpath(file), stat.st_size, *times, stat.st_ino, digest])
        name = hashlib.sha256(json.dumps(decisive).encode()).hexdigest()[:32]
        return self.records / f"{name}.checked"


def hash_of(file: Path) -> str:
    """Return a file's hash, as in an index. Raises OSError when the process ends."""
    # Only here: a config's check does without.
    import xxhash

    found = xxhash.xxh3_128()
    block = memoryview(bytearray(_BLOCK))
    with open(file, "rb", buffering=0) as stream:
        while count := stream.readinto(block):
            if ending.is_set():
                raise OSError("the process ends")
            found.update(block[:count])
    return f"{HASH}{found.hexdigest()}"


class HashCheck:
    """Compares the hashes of parts with their index, in the order of their first reads."""

    def __init__(self, parts: Sequence[PartHashes]) -> None:
        self._parts = parts
        self._begun: dict[int, Future[None]] = {}
        self._pool = Pool(1, "titanlite-check")
        self._problem: DataError | None = None
        self._lock = threading.Lock()

    def begin(self, number: int) -> None:
        """Check a part that is about to be read. Raises DataError if one is damaged."""
        with self._lock:
            if number not in self._begun:
                began = time.strftime("%Y-%m-%d %H:%M:%S")
                self._begun[number] = self._pool.submit(self._check, self._parts[number], began)
        self.raise_found()

    def raise_found(self) -> None:
        """Raise DataError if a part is found to be damaged."""
        if self._problem is not None:
            raise self._problem

    def settle(self, seconds: float) -> int:
        """Wait for the parts that are read; return how many are unchecked after `seconds`.

        Raises DataError if a part is damaged.
        """
        left = wait(list(self._begun.values()), seconds).not_done
        self.raise_found()
        return len(left)

    def _check(self, part: PartHashes, began: str) -> None:
        try:
            if not part.is_known():
                part.compare()
        except OSError as error:
            self._problem = DataError(f"{', '.join(map(str, part.hashes))}: {error}")
        except DataError as error:
            self._problem = DataError(
                f"{error}. It was first read at {began}. Checkpoints saved since then may hold "
                "what it taught: go on from an older one (checkpoint.load_step). "
                f"{_REPAIR}"
            )


# At the start


def check_offsets(
    file: Path | str,
    offsets: NDArray[np.int64],
    tokens: int,
    remedy: str = "prepare the text again",
) -> None:
    """Check where documents begin in a part, [documents + 1].

    Raises DataError, naming file and place, unless offsets ascend from 0 to the end.
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


def check_sizes(folder: Path, part: Mapping[str, Any], item: int) -> None:
    """Compare the sizes of a part's files with its record, at `item` bytes a token.

    Raises DataError for a difference, OSError for a missing file.
    """
    tokens = part["tokens"]
    sizes = {
        "tokens": tokens * item,
        "offsets": 8 * (part["documents"] + 1),
        "targets": -(-tokens // 8),
    }
    for suffix in part["bytes"]:
        file = folder / f"{part['name']}.{suffix}"
        found = file.stat().st_size
        if found != sizes[suffix]:
            raise DataError(
                f"{file} has {found:,} bytes instead of {sizes[suffix]:,}; prepare it again"
            )
