"""Tokenized text on disk: one process of a node tokenizes, the others and later runs map the file.

A file is named after all that decides its content (path, size and times of the texts, tokenizer, library versions), is
written under another name and published whole, and carries a checksum. A lock that ends with its process keeps others
from doing the same work meanwhile. Whatever goes wrong with disk or lock, the text is tokenized in memory instead.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import logging
import os
import tempfile
import time
import zlib
from collections.abc import Callable, Iterable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from titanlite._version import __version__
from titanlite.data.corpus import PACKING, Corpus, tokenize
from titanlite.data.tokenizer import Tokenizer

logger = logging.getLogger("titanlite")

#: Bytes of text files from which on "auto" keeps tokens: less is tokenized in about a second.
AUTO_BYTES = 32 << 20

#: Seconds after which a lock whose owner makes no progress is waited for no longer.
STALLED = 60.0

#: Seconds without use after which a file is removed.
KEEP = 7 * 86400.0

_HEADER_BYTES = 4096
_PIECE = 32 << 20
_LIBRARIES = ("tiktoken", "sentencepiece", "tokenizers")


def load_corpus(files: list[Path], tokenizer: Tokenizer, vocab_size: int, *, workers: int | None, cache: str) -> Corpus:
    """The tokens of `files`, from `cache` if they are there.

    Args:
        workers: threads that tokenize, see `tokenize`; None: as many as there are cores for this rank, 8 at most.
        cache: a folder; "auto": one below the system's folder of temporary files, for large texts; "off": none.

    Raises DataError as `tokenize` does.
    """
    folder = _folder(files, cache)
    if folder is None:
        return tokenize(files, tokenizer, vocab_size, _workers(workers, alone=False))
    try:
        _make_private(folder, shared=cache == "auto")
        stamp = _stamp(files, tokenizer, vocab_size)
        path = folder / f"{stamp}.tokens"
        found = _load(path, files, tokenizer)
        if found is None:
            with _lock(folder / f"{stamp}.lock") as lock:
                found = _load(path, files, tokenizer)
                if found is None and not lock.waited:
                    corpus = tokenize(files, tokenizer, vocab_size, _workers(workers, alone=True), lock.touch)
                    if _stamp(files, tokenizer, vocab_size) == stamp:  # else they were written to meanwhile
                        found = _keep(corpus, path, files, tokenizer, lock.touch)
                    return found or corpus
    except OSError as error:
        logger.warning(f"data.token_cache: {folder} cannot be used ({error}); this rank tokenizes the text for itself")
        found = None
    # The process that was waited for left nothing: whatever kept it from writing would keep this one, too.
    return found or tokenize(files, tokenizer, vocab_size, _workers(workers, alone=False))


def _workers(wanted: int | None, alone: bool) -> int:
    """Threads to tokenize with. alone: the other ranks of this node wait meanwhile."""
    if wanted is not None:
        return wanted
    ranks = 1 if alone else max(int(os.environ.get("LOCAL_WORLD_SIZE", "1")), 1)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(cores // ranks, 8) if cores // ranks > 1 else 0


def _folder(files: list[Path], cache: str) -> Path | None:
    if cache == "off":
        return None
    if cache != "auto":
        return Path(cache)
    try:
        large = sum(file.stat().st_size for file in files) >= AUTO_BYTES
    except OSError:
        return None  # reading says what is wrong
    return Path(tempfile.gettempdir()) / f"titanlite-tokens-{os.getuid()}" if large else None


def _make_private(folder: Path, shared: bool) -> None:
    """Make the folder. Raises OSError if one below a place where all may write belongs to somebody else."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if shared and (folder.is_symlink() or folder.stat().st_uid != os.getuid()):
        raise PermissionError("it belongs to another user")


def _stamp(files: list[Path], tokenizer: Tokenizer, vocab_size: int) -> str:
    """Changes with everything that the tokens depend on. The time of a file's change of state cannot be set back."""
    texts = []
    for file in files:
        seen = file.stat()
        texts.append([str(file.resolve()), seen.st_size, seen.st_mtime_ns, seen.st_ctime_ns])
    versions = [__version__]
    for name in _LIBRARIES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions.append(f"{name} {metadata.version(name)}")
    decisive = [PACKING, tokenizer.fingerprint, vocab_size, versions, texts]
    return hashlib.sha256(json.dumps(decisive).encode()).hexdigest()[:32]


class _Lock:
    """Held, or waited for in vain (`waited`): its owner is done, dead, or has not moved for `STALLED` seconds."""

    def __init__(self, file: BinaryIO, waited: bool) -> None:
        self.waited = waited
        self._file = file
        self._touched = time.monotonic()

    def touch(self) -> None:
        """Show those who wait that this process is at work."""
        if time.monotonic() - self._touched > 1.0:
            self._touched = time.monotonic()
            os.utime(self._file.fileno())


@contextlib.contextmanager
def _lock(path: Path) -> Iterator[_Lock]:
    with open(path, "a+b") as file:
        lock = _Lock(file, waited=not _try_lock(file, fcntl.LOCK_EX))
        if lock.waited:
            _wait(file, path)
        else:
            os.utime(file.fileno())
        yield lock
        if not lock.waited:
            path.unlink(missing_ok=True)


def _wait(file: BinaryIO, path: Path) -> None:
    """Until the owner lets go, or shows no sign of life. Clocks of a file server may differ from ours."""
    seen, changed = os.fstat(file.fileno()).st_mtime_ns, time.monotonic()
    said = changed
    while not _try_lock(file, fcntl.LOCK_SH):
        time.sleep(0.05)
        now = time.monotonic()
        if (moved := os.fstat(file.fileno()).st_mtime_ns) != seen:
            seen, changed = moved, now
        if now - changed > STALLED:
            logger.warning(f"the process that holds {path} has not moved for {STALLED:.0f} s: not waiting any longer")
            return
        if now - said > 30.0:
            said = now
            logger.info(f"waiting for another process to tokenize the text ({path})")


def _try_lock(file: BinaryIO, kind: int) -> bool:
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _load(path: Path, files: list[Path], tokenizer: Tokenizer) -> Corpus | None:
    """The tokens of `path`, mapped into memory; None if there are none. A damaged file is removed."""
    try:
        file = open(path, "rb")  # noqa: SIM115 - closed below, the maps have descriptors of their own
    except FileNotFoundError:
        return None
    with file:
        # Shared by all who map the file, for as long as they do: `_remove_old` leaves it alone.
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
    """What the file says about itself, or None if it is not as long as it says. Leaves the file at the end of it."""
    try:
        about = json.loads(file.read(_HEADER_BYTES))
        payload = 8 * (about["documents"] + 1) + np.dtype(about["dtype"]).itemsize * about["tokens"]
        whole = os.fstat(file.fileno()).st_size == _HEADER_BYTES + payload and "crc32" in about
        return about if whole and isinstance(about["fingerprint"], str) else None
    except (ValueError, KeyError, TypeError):
        return None


def _checksum(about: dict[str, Any], pieces: Iterable[bytes | memoryview]) -> int:
    """CRC-32 of the header, but for the checksum itself, and of what follows it."""
    named = {name: value for name, value in about.items() if name != "crc32"}
    checksum = zlib.crc32(json.dumps(named, sort_keys=True).encode())
    for piece in pieces:
        checksum = zlib.crc32(piece, checksum)
    return checksum


def _keep(
    corpus: Corpus, path: Path, files: list[Path], tokenizer: Tokenizer, progress: Callable[[], None]
) -> Corpus | None:
    """Write `corpus` and give it back as a map of the file; None if that cannot be."""
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
        with tempfile.NamedTemporaryFile(dir=folder, suffix=".partial", delete=False) as file:
            partial = Path(file.name)
            file.seek(_HEADER_BYTES)

            def written() -> Iterator[memoryview]:
                for array in (corpus.offsets, corpus.tokens):
                    content = array.view(np.uint8).data
                    for start in range(0, len(content), _PIECE):
                        piece = content[start : start + _PIECE]
                        file.write(piece)
                        progress()
                        yield piece

            about["crc32"] = _checksum(about, written())
            file.seek(0)
            file.write(json.dumps(about).encode().ljust(_HEADER_BYTES))
            file.flush()
            os.fsync(file.fileno())
        with contextlib.suppress(FileExistsError):  # of another node, where the file system has no common locks
            # Not a rename: a file that others have mapped must not lose its name to another one.
            os.link(partial, path)
    except OSError as error:
        logger.warning(f"data.token_cache: tokens cannot be kept in {folder} ({error.strerror or error})")
        return None
    finally:
        if partial is not None:
            partial.unlink(missing_ok=True)
    size = path.stat().st_size / 1e6
    logger.info(
        f"tokens kept in {path} ({size:,.0f} MB) for this node's ranks and later runs; data.token_cache says where"
    )
    return _load(path, files, tokenizer)


def _remove_old(folder: Path) -> None:
    """Remove what nobody has used for `KEEP` seconds and nobody has open."""
    for path in folder.iterdir():
        if path.suffix not in (".tokens", ".partial", ".lock"):
            continue
        with contextlib.suppress(OSError), open(path, "rb") as file:
            if time.time() - os.fstat(file.fileno()).st_mtime > KEEP and _try_lock(file, fcntl.LOCK_EX):
                path.unlink()
