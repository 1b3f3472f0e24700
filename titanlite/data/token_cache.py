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
import time
import zlib
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from titanlite._version import __version__
from titanlite.data import DataError
from titanlite.data.corpus import PACKING, Corpus, tokenize
from titanlite.data.formats import Columns, Format
from titanlite.data.sources import iter_records
from titanlite.data.tokenizer import Tokenizer
from titanlite.utils import logger

#: "auto" keeps the tokens of texts of at least so many bytes: less is tokenized in about a second.
AUTO_BYTES = 32 << 20

#: Seconds after which nobody waits for the owner of a lock any longer.
PATIENCE = 3600.0

#: Seconds without use after which a file is removed.
KEEP = 7 * 86400.0

#: Seconds without a write after which a partial file without a lock is removed. Nodes may have no common locks, so
#: the time of the last write counts too.
_WRITING = 10.0

_HEADER_BYTES = 4096
_PIECE = 32 << 20
_NAMES = re.compile(r"[0-9a-f]{32}(\.tokens|\.lock|-\w+\.partial)")
_LIBRARIES = ("tiktoken", "sentencepiece", "tokenizers")


def load_corpus(
    files: list[Path],
    tokenizer: Tokenizer,
    vocab_size: int,
    *,
    workers: int | None,
    cache: str,
    columns: Columns | None = None,
    kind: Format = "auto",
) -> Corpus:
    """Return the tokens of `files`, from `cache` if they are there.

    Args:
        workers: threads that tokenize, see `tokenize`; None: the cores of the node per rank, 8 at most.
        cache: a folder, `~` is the home; "auto": one in the system's folder of temporary files, for large texts;
            "off": none.
        columns, kind: of the records, see `iter_rows`.

    Raises DataError as `tokenize` does, and if LOCAL_WORLD_SIZE, which decides the number of threads, is no number.
    """
    if cache != "off" and (cache != "auto" or _are_large(files)):
        try:
            folder = _folder(cache)
            stamp = _stamp(files, tokenizer, vocab_size, columns, kind)
            path = folder / f"{stamp}.tokens"
            if found := _load(path, files, tokenizer):
                return found
            with _lock(folder / f"{stamp}.lock") as held:
                if found := _load(path, files, tokenizer):
                    return found
                if held:
                    records = iter_records(files, columns, kind)
                    corpus = tokenize(files, tokenizer, vocab_size, workers_of(workers, alone=True), records)
                    # Another stamp: the text has changed meanwhile.
                    if _stamp(files, tokenizer, vocab_size, columns, kind) == stamp:
                        _save(corpus, path)
                    return _load(path, files, tokenizer) or corpus
        except OSError as error:
            message = f'data.token_cache: "{cache}" cannot be used ({error}); this rank tokenizes the text for itself'
            logger.warning(message)
    return tokenize(files, tokenizer, vocab_size, workers_of(workers, alone=False), iter_records(files, columns, kind))


def workers_of(wanted: int | None, alone: bool = False) -> int:
    """Return the number of threads. alone: the other ranks of this node wait meanwhile."""
    if wanted is not None:
        return wanted
    text = "1" if alone else os.environ.get("LOCAL_WORLD_SIZE", "1")
    if not text.isdigit():
        message = f"environment variable LOCAL_WORLD_SIZE is {text!r}, expected the number of ranks of this node"
        raise DataError(f"{message}; torchrun sets it")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    share = cores // max(int(text), 1)
    return min(share, 8) if share > 1 else 0


def _are_large(files: list[Path]) -> bool:
    try:
        return sum(file.stat().st_size for file in files) >= AUTO_BYTES
    except OSError:
        return False  # the error comes when the text is read


def _folder(cache: str) -> Path:
    """Return the folder, made if need be. Raises OSError if it cannot be made, or belongs to another user."""
    own = Path(tempfile.gettempdir(), f"titanlite-tokens-{os.getuid()}")
    try:
        folder = own if cache == "auto" else Path(cache).expanduser()
    except RuntimeError as error:  # no such user, or no home
        raise FileNotFoundError(str(error)) from None
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if cache == "auto" and (folder.is_symlink() or folder.stat().st_uid != os.getuid()):
        raise PermissionError(f"{folder} belongs to another user")
    return folder


def _stamp(
    files: list[Path], tokenizer: Tokenizer, vocab_size: int, columns: Columns | None = None, kind: Format = "auto"
) -> str:
    """Return a hash of everything that decides the tokens. A file's ctime cannot be set back."""
    wanted = (columns or Columns()).wanted
    stats = [(file, file.stat()) for file in files]
    texts = [[str(file.resolve()), stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns] for file, stat in stats]
    versions = [__version__]
    for name in _LIBRARIES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions.append(f"{name} {metadata.version(name)}")
    decisive = [PACKING, tokenizer.fingerprint, vocab_size, versions, texts]
    if (wanted, kind) != (Columns().wanted, "auto"):
        decisive += [wanted, kind, *(columns.chat or () if columns else ())]
    return hashlib.sha256(json.dumps(decisive).encode()).hexdigest()[:32]


@contextlib.contextmanager
def _lock(path: Path) -> Iterator[bool]:
    """Hold the lock (True), or wait until its owner is done or dead, `PATIENCE` seconds at most (False)."""
    with open(path, "a+b") as file:
        if _try_lock(file, fcntl.LOCK_EX):
            try:
                yield True
            finally:
                path.unlink(missing_ok=True)
            return
        waited, logged = 0.0, 30.0
        while not _try_lock(file, fcntl.LOCK_SH) and waited < PATIENCE:
            time.sleep(0.05)
            waited += 0.05
            if waited > logged:
                logged += 30.0
                logger.info(f"waiting for another process to tokenize the text ({path})")
    yield False


def _try_lock(file: BinaryIO, kind: int) -> bool:
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _load(path: Path, files: list[Path], tokenizer: Tokenizer) -> Corpus | None:
    """Map the tokens of `path` into memory; None if there is no such file. Removes a damaged file."""
    if not path.exists():
        return None
    with open(path, "rb") as file:
        # Shared by all processes that map the file, so that `_remove_old` keeps it.
        if not _try_lock(file, fcntl.LOCK_SH) or os.fstat(file.fileno()).st_nlink == 0:
            return None
        about = _header(file)
        if about is None:
            logger.warning(f"{path} is damaged: it is removed, and the text is tokenized again")
            path.unlink(missing_ok=True)
            return None
        offsets = np.memmap(file, dtype=np.int64, mode="r", offset=_HEADER_BYTES, shape=(about["documents"] + 1,))
        start, dtype = _HEADER_BYTES + offsets.nbytes, np.dtype(about["dtype"])
        count = about["tokens"]
        tokens = np.memmap(file, dtype=dtype, mode="r", offset=start, shape=(count,))
        targets = None
        if about.get("targets"):
            map_ = np.memmap(file, dtype=np.bool_, mode="r", offset=start + tokens.nbytes, shape=(count,))
            targets = map_.view(np.ndarray)
    with contextlib.suppress(OSError):
        os.utime(path)
    # Plain arrays over the maps: slices of a memmap are slower.
    arrays = tokens.view(np.ndarray), offsets.view(np.ndarray)
    return Corpus(*arrays, tokenizer.eos_id, about["fingerprint"], tuple(files), targets)


def _header(file: BinaryIO) -> dict[str, Any] | None:
    """Read the header; None if the file has another length or checksum than it says."""
    try:
        about = json.loads(file.read(_HEADER_BYTES))
        width = np.dtype(about["dtype"]).itemsize + bool(about.get("targets"))
        payload = 8 * (about["documents"] + 1) + width * about["tokens"]
        checksum = about.pop("crc32")
        found = zlib.crc32(json.dumps(about, sort_keys=True).encode())
    except (ValueError, KeyError, TypeError, AttributeError):
        return None
    while piece := file.read(_PIECE):
        found = zlib.crc32(piece, found)
    return about if found == checksum and file.tell() == _HEADER_BYTES + payload else None


def _save(corpus: Corpus, path: Path) -> None:
    """Write `corpus`, with a warning if that fails."""
    about = {
        "documents": len(corpus.offsets) - 1,
        "tokens": len(corpus.tokens),
        "dtype": corpus.tokens.dtype.str,
        "fingerprint": corpus.fingerprint,
    }
    arrays: list[NDArray[Any]] = [corpus.offsets, corpus.tokens]
    if corpus.targets is not None:
        about["targets"] = True
        arrays.append(corpus.targets)
    partial: Path | None = None
    try:
        _remove_old(path.parent)
        with tempfile.NamedTemporaryFile(
            dir=path.parent, prefix=f"{path.stem}-", suffix=".partial", delete=False
        ) as file:
            partial = Path(file.name)
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # so that `_remove_old` keeps it
            file.seek(_HEADER_BYTES)
            checksum = zlib.crc32(json.dumps(about, sort_keys=True).encode())
            for content in (array.view(np.uint8).data for array in arrays):
                for start in range(0, len(content), _PIECE):
                    file.write(content[start : start + _PIECE])
                    checksum = zlib.crc32(content[start : start + _PIECE], checksum)
            file.seek(0)
            file.write(json.dumps({**about, "crc32": checksum}).encode().ljust(_HEADER_BYTES))
            file.flush()
            os.fsync(file.fileno())
            with contextlib.suppress(FileExistsError):  # by another node, if the file system has no common locks
                os.link(partial, path)  # not a rename: it would replace a file that others have mapped
        size = path.stat().st_size / 1e6
        logger.info(f"tokens saved in {path} ({size:,.0f} MB) for this node's ranks and later runs (data.token_cache)")
    except OSError as error:
        logger.warning(f"data.token_cache: tokens cannot be saved in {path.parent} ({error.strerror or error})")
    finally:
        if partial is not None:
            partial.unlink(missing_ok=True)


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
