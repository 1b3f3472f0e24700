"""Tokenized text on disk: one process of a node tokenizes, the others and later runs map the file.

The name of a file is a hash of all that decides its content: path, size and times of the texts, tokenizer, library
versions. A file is published atomically and has a checksum. A lock that ends with its process keeps others from the
same work. When disk or lock fail, the text is tokenized in memory instead.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import re
import tempfile
import threading
import time
import zlib
from collections.abc import Iterable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from titanlite._version import __version__
from titanlite.data import DataError
from titanlite.data.corpus import PACKING, Corpus, tokenize
from titanlite.data.tokenizer import Tokenizer
from titanlite.utils import logger

#: "auto" keeps the tokens of texts of at least so many bytes: less is tokenized in about a second.
AUTO_BYTES = 32 << 20

#: Seconds without a heartbeat of its owner after which nobody waits for a lock.
STALLED = 60.0

#: Seconds without use after which a file is removed.
KEEP = 7 * 86400.0

#: Seconds between two heartbeats. Short, since clients of file servers rarely ask for files that seldom change.
_HEARTBEAT = 1.0

#: Seconds without a write after which a partial file without a lock is removed. Nodes may have no common locks, so
#: the time of the last write counts too.
_WRITING = 10.0

_HEADER_BYTES = 4096
_PIECE = 32 << 20
_NAMES = re.compile(r"[0-9a-f]{32}(\.tokens|\.lock|-\w+\.partial)")
_LIBRARIES = ("tiktoken", "sentencepiece", "tokenizers")


def load_corpus(files: list[Path], tokenizer: Tokenizer, vocab_size: int, *, workers: int | None, cache: str) -> Corpus:
    """Return the tokens of `files`, from `cache` if they are there.

    Args:
        workers: threads that tokenize, see `tokenize`; None: the cores of the node per rank, 8 at most.
        cache: a folder, `~` is the home; "auto": one in the system's folder of temporary files, for large texts;
            "off": none.

    Raises DataError as `tokenize` does, and if LOCAL_WORLD_SIZE, which decides the number of threads, is no number.
    """
    if cache == "off" or cache == "auto" and not _are_large(files):
        return tokenize(files, tokenizer, vocab_size, _workers(workers, alone=False))
    folder: Path | str = f'"{cache}"'
    try:
        folder = _folder(cache)
        stamp = _stamp(files, tokenizer, vocab_size)
        path = folder / f"{stamp}.tokens"
        found = _load(path, files, tokenizer)
        if found is None:
            with _lock(folder / f"{stamp}.lock") as held:
                found = _load(path, files, tokenizer)
                if found is None and held:
                    corpus = tokenize(files, tokenizer, vocab_size, _workers(workers, alone=True))
                    if _stamp(files, tokenizer, vocab_size) == stamp:  # else the text has changed meanwhile
                        found = _save(corpus, path, files, tokenizer)
                    return found or corpus
    except OSError as error:
        logger.warning(f"data.token_cache: {folder} cannot be used ({error}); this rank tokenizes the text for itself")
        found = None
    # The process that held the lock wrote nothing: this one could not write either.
    return found or tokenize(files, tokenizer, vocab_size, _workers(workers, alone=False))


def _workers(wanted: int | None, alone: bool) -> int:
    """Return the number of threads. alone: the other ranks of this node wait meanwhile."""
    if wanted is not None:
        return wanted
    text = "1" if alone else os.environ.get("LOCAL_WORLD_SIZE", "1")
    try:
        ranks = max(int(text), 1)
    except ValueError:
        raise DataError(
            f"environment variable LOCAL_WORLD_SIZE is {text!r}, expected a whole number: the ranks of this node; "
            "torchrun sets it"
        ) from None
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(cores // ranks, 8) if cores // ranks > 1 else 0


def _are_large(files: list[Path]) -> bool:
    try:
        return sum(file.stat().st_size for file in files) >= AUTO_BYTES
    except OSError:
        return False  # the error comes when the text is read


def _folder(cache: str) -> Path:
    """Return the folder, made if need be. Raises OSError if it cannot be made, or belongs to another user."""
    if cache != "auto":
        try:
            folder = Path(cache).expanduser()
        except RuntimeError as error:  # no such user, or no home
            raise FileNotFoundError(str(error)) from None
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        return folder
    folder = _temporary() / f"titanlite-tokens-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.is_symlink() or folder.stat().st_uid != os.getuid():
        raise PermissionError(f"{folder} belongs to another user")
    return folder


def _temporary() -> Path:
    """Return the folder of temporary files. Raises OSError if there is none but the working directory."""
    folder = os.path.abspath(tempfile.gettempdir())
    named = [os.environ.get(name, "") for name in ("TMPDIR", "TEMP", "TMP")]
    usual = [os.path.abspath(name) for name in (*named, "/tmp", "/var/tmp", "/usr/tmp") if name]
    if folder not in usual and folder == os.getcwd():
        raise FileNotFoundError("no folder of temporary files can be written to; set TMPDIR to one that can")
    return Path(folder)


def _stamp(files: list[Path], tokenizer: Tokenizer, vocab_size: int) -> str:
    """Return a hash of everything that decides the tokens. A file's ctime cannot be set back."""
    stats = [(file, file.stat()) for file in files]
    texts = [[str(file.resolve()), stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns] for file, stat in stats]
    versions = [__version__]
    for name in _LIBRARIES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions.append(f"{name} {metadata.version(name)}")
    decisive = [PACKING, tokenizer.fingerprint, vocab_size, versions, texts]
    return hashlib.sha256(json.dumps(decisive).encode()).hexdigest()[:32]


@contextlib.contextmanager
def _lock(path: Path) -> Iterator[bool]:
    """Hold the lock (True), or wait until its owner is done, dead, or silent for `STALLED` seconds (False)."""
    with open(path, "a+b") as file:
        if not _try_lock(file, fcntl.LOCK_EX):
            _wait(file, path)
            yield False
            return
        done = threading.Event()
        # A thread, since a single call to a slow disk may take minutes.
        heartbeat = threading.Thread(target=_beat, args=(file, done), name="titanlite-lock", daemon=True)
        heartbeat.start()
        try:
            yield True
        finally:
            done.set()
            heartbeat.join()
            with contextlib.suppress(OSError):
                path.unlink()


def _beat(file: BinaryIO, done: threading.Event) -> None:
    while not done.wait(_HEARTBEAT):
        with contextlib.suppress(OSError):
            os.utime(file.fileno())


def _wait(file: BinaryIO, path: Path) -> None:
    """Wait until the owner releases the lock or is silent. The clock of a file server may differ from ours."""
    seen, changed = os.fstat(file.fileno()).st_mtime_ns, time.monotonic()
    logged = changed
    while not _try_lock(file, fcntl.LOCK_SH):
        time.sleep(0.05)
        now = time.monotonic()
        if (moved := os.fstat(file.fileno()).st_mtime_ns) != seen:
            seen, changed = moved, now
        if now - changed > STALLED:
            logger.warning(f"the process that holds {path} is silent for {STALLED:.0f} s: not waiting any longer")
            return
        if now - logged > 30.0:
            logged = now
            logger.info(f"waiting for another process to tokenize the text ({path})")


def _try_lock(file: BinaryIO, kind: int) -> bool:
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _load(path: Path, files: list[Path], tokenizer: Tokenizer) -> Corpus | None:
    """Map the tokens of `path` into memory; None if there is no such file. Removes a damaged file."""
    try:
        file = open(path, "rb")  # noqa: SIM115 - closed below, the maps have descriptors of their own
    except FileNotFoundError:
        return None
    with file:
        # Shared by all processes that map the file, so that `_remove_old` keeps it.
        if not _try_lock(file, fcntl.LOCK_SH) or os.fstat(file.fileno()).st_nlink == 0:
            return None
        about = _header(file)
        if about is None or _checksum(about, iter(lambda: file.read(_PIECE), b"")) != about["crc32"]:
            logger.warning(f"{path} is damaged: it is removed, and the text is tokenized again")
            path.unlink(missing_ok=True)
            return None
        documents, total = about["documents"], about["tokens"]
        offsets = np.memmap(file, dtype=np.int64, mode="r", offset=_HEADER_BYTES, shape=(documents + 1,))
        start = _HEADER_BYTES + offsets.nbytes
        tokens = np.memmap(file, dtype=np.dtype(about["dtype"]), mode="r", offset=start, shape=(total,))
    with contextlib.suppress(OSError):
        os.utime(path)
    # Plain arrays over the maps: slices of a memmap are slower.
    return Corpus(
        tokens=tokens.view(np.ndarray),
        offsets=offsets.view(np.ndarray),
        pad_id=tokenizer.eos_id,
        fingerprint=about["fingerprint"],
        files=tuple(files),
    )


def _header(file: BinaryIO) -> dict[str, Any] | None:
    """Read the header; None if it is damaged or the file has another length than it says."""
    try:
        about = json.loads(file.read(_HEADER_BYTES))
        payload = 8 * (about["documents"] + 1) + np.dtype(about["dtype"]).itemsize * about["tokens"]
        whole = os.fstat(file.fileno()).st_size == _HEADER_BYTES + payload and "crc32" in about
        return about if whole and isinstance(about["fingerprint"], str) else None
    except (ValueError, KeyError, TypeError):
        return None


def _checksum(about: dict[str, Any], pieces: Iterable[bytes | memoryview]) -> int:
    """Return the CRC-32 of the header without the checksum, and of `pieces`."""
    named = {name: value for name, value in about.items() if name != "crc32"}
    checksum = zlib.crc32(json.dumps(named, sort_keys=True).encode())
    for piece in pieces:
        checksum = zlib.crc32(piece, checksum)
    return checksum


def _save(corpus: Corpus, path: Path, files: list[Path], tokenizer: Tokenizer) -> Corpus | None:
    """Write `corpus` and return it as a map of the file; None if that fails."""
    folder = path.parent
    about: dict[str, Any] = {
        "documents": len(corpus.offsets) - 1,
        "tokens": len(corpus.tokens),
        "dtype": corpus.tokens.dtype.str,
        "fingerprint": corpus.fingerprint,
    }
    partial: Path | None = None
    try:
        _remove_old(folder)
        with tempfile.NamedTemporaryFile(dir=folder, prefix=f"{path.stem}-", suffix=".partial", delete=False) as file:
            partial = Path(file.name)
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # so that `_remove_old` keeps it
            file.seek(_HEADER_BYTES)

            def written() -> Iterator[memoryview]:
                for array in (corpus.offsets, corpus.tokens):
                    content = array.view(np.uint8).data
                    for start in range(0, len(content), _PIECE):
                        piece = content[start : start + _PIECE]
                        file.write(piece)
                        yield piece

            about["crc32"] = _checksum(about, written())
            file.seek(0)
            file.write(json.dumps(about).encode().ljust(_HEADER_BYTES))
            file.flush()
            os.fsync(file.fileno())
            with contextlib.suppress(FileExistsError):  # by another node, if the file system has no common locks
                os.link(partial, path)  # not a rename: it would replace a file that others have mapped
    except OSError as error:
        logger.warning(f"data.token_cache: tokens cannot be saved in {folder} ({error.strerror or error})")
        return None
    finally:
        if partial is not None:
            partial.unlink(missing_ok=True)
    size = path.stat().st_size / 1e6
    logger.info(f"tokens saved in {path} ({size:,.0f} MB) for this node's ranks and later runs (data.token_cache)")
    return _load(path, files, tokenizer)


def _remove_old(folder: Path) -> None:
    """Remove files of ours that dead writers left, and files that nobody used for `KEEP` seconds."""
    for path in folder.iterdir():
        if not _NAMES.fullmatch(path.name):
            continue
        idle = _WRITING if path.suffix == ".partial" else KEEP
        # For writing, though nothing is written: file servers ask for it with an exclusive lock.
        with contextlib.suppress(OSError), open(path, "r+b") as file:
            if time.time() - os.fstat(file.fileno()).st_mtime > idle and _try_lock(file, fcntl.LOCK_EX):
                path.unlink()
