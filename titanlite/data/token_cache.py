"""Tokenized text on disk: one process of a node tokenizes, the others and later runs map the file.

The name of a file is a hash of all that decides its content: path, size and times of the texts,
tokenizer, library versions. A file is published atomically and has a checksum. A lock that ends
with its process keeps others from the same work. When disk or lock fail, the text is tokenized in
memory instead.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import re
import secrets
import tempfile
import time
import zlib
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from titanlite import __version__
from titanlite.data.corpus import PACKING, Corpus, tokenize, workers_of
from titanlite.data.kinds import Format
from titanlite.data.records import Columns
from titanlite.data.sources import iter_records
from titanlite.data.tokenizer import Tokenizer
from titanlite.utils import logger, parse_json

#: "auto" keeps the tokens of texts of at least so many bytes: less is tokenized in a tenth of a
#: second.
AUTO_BYTES = 1 << 20

#: Seconds after which nobody waits for the owner of a lock any longer.
PATIENCE = 3600.0

#: Seconds without use after which a file is removed, and without a write, a partial one. A run that
#: has mapped a file goes on without its name.
KEEP, _WRITING = 30 * 86400.0, 3600.0

_HEADER_BYTES = 4096
_NAMES = re.compile(r"[0-9a-f]{32}(\.tokens|\.lock|\.checked|-\w+\.partial)")
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
        workers: threads that tokenize, see `tokenize`; None: the cores of the node per rank, 8 at
            most.
        cache: a folder, `~` is the home; "auto": one in the system's folder of temporary files, for
            large texts; "off": none.
        columns, kind: of the records, see `iter_rows`.

    Raises DataError as `tokenize` and `workers_of` do.
    """
    if cache != "off" and (cache != "auto" or _are_large(files)):
        try:
            folder = cache_folder(cache)
            stamp = _stamp(files, tokenizer, vocab_size, columns, kind)
            path = folder / f"{stamp}.tokens"
            if found := _load(path, files, tokenizer):
                return found
            with _lock(folder / f"{stamp}.lock", path) as held:
                if found := _load(path, files, tokenizer):
                    return found
                if held:
                    records = iter_records(files, columns, kind)
                    corpus = tokenize(
                        files, tokenizer, vocab_size, workers_of(workers, alone=True), records
                    )
                    # Another stamp: the text has changed meanwhile.
                    if _stamp(files, tokenizer, vocab_size, columns, kind) == stamp:
                        _save(corpus, path)
                    return _load(path, files, tokenizer) or corpus
        except OSError as error:
            message = (
                f'data.token_cache: "{cache}" cannot be used ({error}); this rank tokenizes the '
                "text for itself"
            )
            logger.warning(message)
    return tokenize(
        files,
        tokenizer,
        vocab_size,
        workers_of(workers, alone=False),
        iter_records(files, columns, kind),
    )


def _are_large(files: list[Path]) -> bool:
    try:
        return sum(file.stat().st_size for file in files) >= AUTO_BYTES
    except OSError:
        return False  # the error comes when the text is read


def cache_folder(cache: str) -> Path:
    """Return the folder of `data.token_cache`, made if need be.

    Raises OSError if it cannot be made, or belongs to another user.
    """
    own = Path(tempfile.gettempdir(), f"titanlite-tokens-{os.getuid()}")
    try:
        folder = own if cache == "auto" else Path(cache).expanduser()
    except RuntimeError as error:  # no such user, or no home
        raise FileNotFoundError(str(error)) from None
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if cache == "auto" and (folder.is_symlink() or folder.stat().st_uid != os.getuid()):
        raise PermissionError(f"{folder} belongs to another user")
    return folder


def records_folder(cache: str) -> Path | None:
    """Return the folder for records of token files that are whole; None where nothing is kept."""
    if cache == "off":
        return None
    try:
        return cache_folder(cache)
    except OSError:
        return None


def _stamp(
    files: list[Path],
    tokenizer: Tokenizer,
    vocab_size: int,
    columns: Columns | None = None,
    kind: Format = "auto",
) -> str:
    """Return a hash of everything that decides the tokens. A file's ctime cannot be set back."""
    columns = columns or Columns()
    wanted = columns.wanted
    stats = [(file, file.stat()) for file in files]
    texts = [
        [str(file.resolve()), stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns]
        for file, stat in stats
    ]
    versions = [__version__]
    for name in _LIBRARIES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions.append(f"{name} {metadata.version(name)}")
    decisive = [PACKING, tokenizer.fingerprint, vocab_size, versions, texts]
    if (wanted, kind) != (Columns().wanted, "auto"):
        decisive += [wanted, kind]
    decisive += columns.chat or ()
    return hashlib.sha256(json.dumps(decisive).encode()).hexdigest()[:32]


@contextlib.contextmanager
def _lock(path: Path, done: Path) -> Iterator[bool]:
    """Hold the lock (True), or wait until its owner has written `done`, `PATIENCE` seconds at most
    (False).
    """
    with open(path, "a+b") as file:
        waited, logged = 0.0, 30.0
        while not _try_lock(file):
            if done.exists() or waited > PATIENCE:
                yield False
                return
            time.sleep(0.05)
            waited += 0.05
            if waited > logged:
                logged += 30.0
                logger.info(f"waiting for another process to tokenize the text ({path})")
        try:
            yield True
        finally:
            path.unlink(missing_ok=True)


def _try_lock(file: BinaryIO) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _load(path: Path, files: list[Path], tokenizer: Tokenizer) -> Corpus | None:
    """Map the tokens of `path` into memory; None if there is no such file. Removes a
    damaged file.
    """
    if not path.exists():
        return None
    try:
        with open(path, "rb") as file:
            about = parse_json(file.read(_HEADER_BYTES))
        kinds = [("<i8", about["documents"] + 1), (about["dtype"], about["tokens"])]
        kinds += [("?", about["tokens"])] * bool(about.get("targets"))
        arrays, at = list[NDArray[Any]](), _HEADER_BYTES
        if path.stat().st_size != at + sum(
            np.dtype(kind).itemsize * count for kind, count in kinds
        ):
            raise ValueError("it has another length")
        for kind, count in kinds:  # plain arrays over the maps: slices of a memmap are slower
            arrays.append(
                np.memmap(path, dtype=kind, mode="r", offset=at, shape=(count,)).view(np.ndarray)
            )
            at += arrays[-1].nbytes
        if about.pop("crc32") != _checksum(about, arrays):
            raise ValueError("it has another checksum")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        logger.warning(
            f"{path} is damaged ({error}): it is removed, and the text is tokenized again"
        )
        path.unlink(missing_ok=True)
        return None
    with contextlib.suppress(OSError):
        os.utime(path)
    offsets, tokens, *targets = arrays
    return Corpus(tokens, offsets, tokenizer.eos_id, about["fingerprint"], tuple(files), *targets)


def _checksum(about: dict[str, Any], arrays: list[NDArray[Any]]) -> int:
    found = zlib.crc32(json.dumps(about, sort_keys=True).encode())
    for array in arrays:
        found = zlib.crc32(array.view(np.uint8).data, found)
    return found


def _save(corpus: Corpus, path: Path) -> None:
    """Write `corpus`, with a warning if that fails."""
    arrays: list[NDArray[Any]] = [corpus.offsets, corpus.tokens]
    about = {
        "documents": corpus.documents,
        "tokens": corpus.size,
        "dtype": corpus.tokens.dtype.str,
        "fingerprint": corpus.fingerprint,
    }
    if corpus.targets is not None:
        about["targets"] = True
        arrays.append(corpus.targets)
    partial = path.with_name(f"{path.stem}-{secrets.token_hex(4)}.partial")
    try:
        _remove_old(path.parent)
        with open(partial, "wb") as file:
            file.write(
                json.dumps({**about, "crc32": _checksum(about, arrays)})
                .encode()
                .ljust(_HEADER_BYTES)
            )
            for array in arrays:
                file.write(array.view(np.uint8).data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
        size = path.stat().st_size / 1e6
        logger.info(
            f"tokens saved in {path} ({size:,.0f} MB) for this node's ranks and later runs "
            "(data.token_cache)"
        )
    except OSError as error:
        logger.warning(
            f"data.token_cache: tokens cannot be saved in {path.parent} ({error.strerror or error})"
        )
    finally:
        partial.unlink(missing_ok=True)


def _remove_old(folder: Path) -> None:
    """Remove files of ours that nobody has used for `KEEP` seconds, and partial ones that nobody
    has written to.
    """
    for path in folder.iterdir():
        with contextlib.suppress(OSError):
            idle = time.time() - path.stat().st_mtime
            if _NAMES.fullmatch(path.name) and idle > (
                _WRITING if path.suffix == ".partial" else KEEP
            ):
                path.unlink()
