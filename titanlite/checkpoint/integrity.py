"""Hashes of files, by which a byte that has changed is found. No torch here."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Literal, Protocol

from titanlite.checkpoint.index import INDEX, index_problem
from titanlite.checkpoint.place import Place, StoreError

if TYPE_CHECKING:
    from titanlite.checkpoint.manifest import Manifest

Verify = Literal["size", "hash"]

#: What the tensors of new checkpoints are hashed with: against bytes that change on a disk or on their way, 128 bits of
#: XXH3 are as good as any, and cost a save almost nothing. A digest is written with its name, so another may follow.
FAST = "xxh3"
#: For what is small and decides how the rest is read: the index and the manifest itself.
ALGORITHM = "sha256"
#: Name → hexadecimal digits of its digest.
_DIGITS = {"xxh3": 32, "sha256": 64, "blake2b": 64}
#: Bytes that are read at a time.
_BLOCK = 4 << 20
#: Told how many bytes of how many are done; in any thread, one at a time.
Progress = Callable[[int, int], None]
#: Files of one rank that are read at the same time; hashing runs outside of Python's lock.
_THREADS = 4


class Hash(Protocol):
    def update(self, data: bytes | memoryview, /) -> None: ...
    def hexdigest(self) -> str: ...


def new_hash(algorithm: str = ALGORITHM) -> Hash:
    """Raises ValueError for an algorithm that no manifest of ours names."""
    if algorithm not in _DIGITS:
        raise ValueError(f"unknown hash {algorithm!r}")
    if algorithm == "xxh3":
        import xxhash  # only here: `titanlite --help` and a config's check do without

        return xxhash.xxh3_128()
    return hashlib.blake2b(digest_size=32) if algorithm == "blake2b" else hashlib.new(algorithm)


def digest_of(data: bytes, algorithm: str = ALGORITHM) -> str:
    """The hash of some bytes as it is written down: `sha256:…`."""
    found = new_hash(algorithm)
    found.update(data)
    return f"{algorithm}:{found.hexdigest()}"


def algorithm_of(digest: str) -> str:
    """Raises ValueError when it is no digest as `digest_of` writes them."""
    algorithm, colon, value = digest.partition(":")
    if colon and algorithm not in _DIGITS:
        raise ValueError(f"unknown hash {algorithm!r}")
    if not colon or len(value) != _DIGITS[algorithm]:
        raise ValueError(f"{digest!r} is no digest")
    return algorithm


def file_digest(path: Place, algorithm: str = ALGORITHM, read: Callable[[int], None] = lambda count: None) -> str:
    """The hash of a file's contents; `read` is told of each piece's bytes. Raises OSError."""
    found = new_hash(algorithm)
    block = bytearray(_BLOCK)
    view = memoryview(block)
    with path.open("rb", buffering=0) as stream:
        while count := stream.readinto(block):
            found.update(view[:count])
            read(count)
    return f"{algorithm}:{found.hexdigest()}"


def mismatch(path: Place, expected: str, found: str) -> str:
    """Why a file cannot be used."""
    return f"{path} has changed since it was written: {_short(expected)} in the manifest, {_short(found)} found"


def _short(digest: str) -> str:
    return f"{digest[: digest.find(':') + 17]}…"


def check_file(
    path: Place, size: int, digest: str | None, read: Callable[[int], None] = lambda count: None
) -> str | None:
    """What is wrong with a file; None when nothing is. digest: None where only the size is known. read: as above.

    Raises StoreError when a store cannot be asked, which says nothing of the file.
    """
    try:
        found = path.stat().st_size
        if found != size:
            return f"{path} has {found} bytes, the manifest says {size}"
        if digest is None:
            return None
        now = file_digest(path, algorithm_of(digest), read)
    except FileNotFoundError:
        return f"{path} is missing"
    except StoreError:
        raise
    except OSError as error:
        return f"{path} cannot be read: {error.strerror or error}"
    return None if now == digest else mismatch(path, digest, now)


def check_files(
    folder: Place, manifest: Manifest, names: Sequence[str] | None = None, progress: Progress = lambda done, total: None
) -> list[str]:
    """What is wrong with some files of a checkpoint (None: all), a line each; empty when they are as written.

    An index must fit the manifest too. Raises StoreError as `check_file` does.
    """
    names = sorted(manifest.files) if names is None else names
    if not names:
        return []
    total = sum(manifest.files[name] for name in names)
    done, lock = 0, threading.Lock()

    def read(count: int) -> None:
        nonlocal done
        with lock:
            done += count
            progress(done, total)

    def check(name: str) -> str | None:
        problem = check_file(folder / name, manifest.files[name], manifest.hashes.get(name), read)
        return index_problem(folder / name, manifest) if problem is None and name == INDEX else problem

    with ThreadPoolExecutor(min(_THREADS, len(names)), thread_name_prefix="titanlite-verify") as pool:
        return [problem for problem in pool.map(check, names) if problem]


def share(files: Mapping[str, int], rank: int, ranks: int) -> list[str]:
    """The files that this rank reads so that all are read once: about equal bytes each, the same answer everywhere."""
    loads = [0] * ranks
    mine: list[str] = []
    for name in sorted(files, key=lambda name: (-files[name], name)):
        least = loads.index(min(loads))
        loads[least] += files[name]
        if least == rank:
            mine.append(name)
    return mine
