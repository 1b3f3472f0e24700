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
from titanlite.data.corpus import PACKING, Corpus, tokenize
from titanlite.data.errors import DataError
from titanlite.data.tokenizer import Tokenizer

logger = logging.getLogger("titanlite")

#: Bytes of text files from which on "auto" keeps tokens: less is tokenized in about a second.
AUTO_BYTES = 32 << 20

#: Seconds after which a lock whose owner shows no sign of life is waited for no longer.
STALLED = 60.0

#: Seconds without use after which a file is removed.
KEEP = 7 * 86400.0

#: Seconds between two signs of life. Short, since file servers' clients ask rarely for what seldom changes.
_SIGN = 1.0

#: Seconds after which a file in the making that is not locked is nobody's. Where nodes have no common locks, the time
#: of the last write is all that there is to see.
_WRITING = 10.0

_HEADER_BYTES = 4096
_PIECE = 32 << 20
_NAMES = re.compile(r"[0-9a-f]{32}(\.tokens|\.lock|-\w+\.partial)")
_LIBRARIES = ("tiktoken", "sentencepiece", "tokenizers")


def load_corpus(files: list[Path], tokenizer: Tokenizer, vocab_size: int, *, workers: int | None, cache: str) -> Corpus:
    """The tokens of `files`, from `cache` if they are there.

    Args:
        workers: threads that tokenize, see `tokenize`; None: as many as there are cores for this rank, 8 at most.
        cache: a folder, `~` being the home; "auto": one below the system's folder of temporary files, for large texts;
            "off": none.

    Raises DataError as `tokenize` does, and if LOCAL_WORLD_SIZE, which the number of threads follows, is no number.
    """
    if not _wanted(files, cache):
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
                    if _stamp(files, tokenizer, vocab_size) == stamp:  # else they were written to meanwhile
                        found = _keep(corpus, path, files, tokenizer)
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


def _wanted(files: list[Path], cache: str) -> bool:
    if cache != "auto":
        return cache != "off"
    try:
        return sum(file.stat().st_size for file in files) >= AUTO_BYTES
    except OSError:
        return False  # reading says what is wrong


def _folder(cache: str) -> Path:
    """The folder, made if need be. Raises OSError: no place for it, or below one where all may write, not ours."""
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
    """The folder of temporary files. Raises OSError if there is none but the working directory, the last resort."""
    folder = os.path.abspath(tempfile.gettempdir())
    named = [os.environ.get(name, "") for name in ("TMPDIR", "TEMP", "TMP")]
    usual = [os.path.abspath(name) for name in (*named, "/tmp", "/var/tmp", "/usr/tmp") if name]
    if folder not in usual and folder == os.getcwd():
        raise FileNotFoundError("no folder of temporary files can be written to; set TMPDIR to one that can")
    return Path(folder)


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


@contextlib.contextmanager
def _lock(path: Path) -> Iterator[bool]:
    """True: held. False: waited for; its owner is done, dead, or shows no sign of life for `STALLED` seconds."""
    with open(path, "a+b") as file:
        if not _try_lock(file, fcntl.LOCK_EX):
            _wait(file, path)
            yield False
            return
        done = threading.Event()
        # A thread, since a single call may take minutes: one to a slow disk, or a copy of many gigabytes.
        signs = threading.Thread(target=_show_life, args=(file, done), name="titanlite-lock", daemon=True)
        signs.start()
        try:
            yield True
        finally:
            done.set()
            signs.join()
            with contextlib.suppress(OSError):
                path.unlink()


def _show_life(file: BinaryIO, done: threading.Event) -> None:
    while not done.wait(_SIGN):
        with contextlib.suppress(OSError):
            os.utime(file.fileno())


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


def _keep(corpus: Corpus, path: Path, files: list[Path], tokenizer: Tokenizer) -> Corpus | None:
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
        with tempfile.NamedTemporaryFile(dir=folder, prefix=f"{path.stem}-", suffix=".partial", delete=False) as file:
            partial = Path(file.name)
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # until it has its name: `_remove_old` leaves it alone
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
    """Remove, of files with our names, those of dead writers and those that nobody has used for `KEEP` seconds."""
    for path in folder.iterdir():
        if not _NAMES.fullmatch(path.name):
            continue
        idle = _WRITING if path.suffix == ".partial" else KEEP
        # For writing, though nothing is written: file servers ask for it with an exclusive lock.
        with contextlib.suppress(OSError), open(path, "r+b") as file:
            if time.time() - os.fstat(file.fileno()).st_mtime > idle and _try_lock(file, fcntl.LOCK_EX):
                path.unlink()
