"""Tokenized text on disk: one process of a node tokenizes, the others and later runs map the file.

The name of a file is a hash of what decides its content: path, size and times of texts, tokenizer,
library versions. A file is published atomically and has a checksum. A lock that ends with its
process keeps others from the same work. When disk or lock fail, the text is tokenized in memory
instead.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import tempfile
import time
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from titanlite import __version__
from titanlite.data import DataError
from titanlite.data.file_kinds import Format
from titanlite.data.records import Columns
from titanlite.data.text_files import iter_records
from titanlite.data.tokenize_files import PACKING, Corpus, tokenize, workers_of
from titanlite.data.tokenizer import Tokenizer
from titanlite.utils import human_time, logger, new_file, not_a_link, parse_json, sync

#: "auto" keeps the tokens of texts of at least this many bytes. Less is tokenized in a tenth of a
#: second.
AUTO_BYTES = 1 << 20

#: Seconds between two looks at another process's lock, between two lines about it, and of the
#: longest wait for it.
_POLL_SECONDS = 0.1
_REPORT_SECONDS = 60.0
_LONGEST_WAIT = 12 * 3600.0
_HEADER_BYTES = 4096
_LIBRARIES = ("tiktoken", "sentencepiece", "tokenizers")


def load_corpus(  # noqa: PLR0913
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

    `workers` None takes the node's cores per rank, 8 at most. `cache` is a folder, "auto"
    (temporary files, for large texts) or "off". Raises DataError as `tokenize` and `workers_of`.
    """
    text = _Text(files, tokenizer, vocab_size, columns, kind)
    if cache != "off":
        try:
            if cache != "auto" or sum(file.stat().st_size for file in files) >= AUTO_BYTES:
                return _from_cache(text, cache_folder(cache), workers)
        except OSError as error:
            logger.warning(
                f'data.token_cache: "{cache}" cannot be used ({error}); this rank tokenizes the '
                "text for itself"
            )
    return text.tokenized(workers_of(workers, alone=False))


@dataclass(frozen=True)
class _Text:
    files: list[Path]
    tokenizer: Tokenizer
    vocab_size: int
    columns: Columns | None
    kind: Format

    def tokenized(self, workers: int) -> Corpus:
        records = iter_records(self.files, self.columns, self.kind)
        return tokenize(self.files, self.tokenizer, self.vocab_size, workers, records)

    def stamp(self) -> str:
        """A file's ctime cannot be set back. Raises OSError for a file that cannot be asked."""
        from importlib import metadata

        columns = self.columns or Columns()
        texts: list[list[Any]] = []
        for file in self.files:
            stat = file.stat()
            path = str(file.resolve())
            texts.append([path, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns])
        versions = [__version__]
        for name in _LIBRARIES:
            with contextlib.suppress(metadata.PackageNotFoundError):
                versions.append(f"{name} {metadata.version(name)}")
        decisive = [PACKING, self.tokenizer.fingerprint, self.vocab_size, versions, texts]
        if (columns.wanted, self.kind) != (Columns().wanted, "auto"):
            decisive += [columns.wanted, self.kind]
        decisive += columns.decisive
        if columns.chat:
            decisive.append("ids of the whole text of a conversation, whose messages have no nulls")
        return hashlib.sha256(json.dumps(decisive).encode()).hexdigest()[:32]


def _from_cache(text: _Text, folder: Path, workers: int | None) -> Corpus:
    """Map the tokens that one process of the node makes and keeps.

    Raises OSError if the folder cannot be used.
    """
    stamp = text.stamp()
    path = folder / f"{stamp}.tokens"
    found = _load(path, text)
    if found is None:
        with _lock(folder / f"{stamp}.lock"):
            found = _load(path, text)
            if found is None:
                corpus = text.tokenized(workers_of(workers, alone=True))
                # Another stamp: the text has changed meanwhile.
                if text.stamp() == stamp:
                    _save(corpus, path)
                found = _load(path, text) or corpus
    return found


def cache_folder(cache: str) -> Path:
    """Return the folder of `data.token_cache`, made if need be.

    Raises OSError if that fails, or it belongs to another user.
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
    """Return the folder for records of whole token files, if anything is kept."""
    if cache == "off":
        return None
    try:
        return cache_folder(cache)
    except OSError:
        return None


@contextlib.contextmanager
def _lock(path: Path) -> Iterator[None]:
    with open(path, "a+b", opener=not_a_link) as file:
        waited = reported = 0.0
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if waited >= _LONGEST_WAIT:
                    raise DataError(
                        f"data.token_cache: another process has held {path} for "
                        f'{human_time(waited)}; end it, or set data.token_cache = "off"'
                    ) from None
            if waited >= reported:
                logger.info(
                    f"waiting for another process to tokenize the text, for {human_time(waited)} "
                    f"now ({path})"
                )
                reported += _REPORT_SECONDS
            time.sleep(_POLL_SECONDS)
            waited += _POLL_SECONDS
        try:
            yield
        finally:
            path.unlink(missing_ok=True)


def _load(path: Path, text: _Text) -> Corpus | None:
    if not path.exists():
        return None
    arrays: list[NDArray[Any]] = []
    try:
        with open(path, "rb") as file:
            about = parse_json(file.read(_HEADER_BYTES))
        kinds = [("<i8", about["documents"] + 1), (about["dtype"], about["tokens"])]
        if about.get("targets"):
            kinds.append(("?", about["tokens"]))
        at = _HEADER_BYTES
        for kind, count in kinds:
            mapped = np.memmap(path, dtype=kind, mode="r", offset=at, shape=(count,))
            # Plain arrays over the maps: slices of a memmap are slower.
            arrays.append(mapped.view(np.ndarray))
            at += mapped.nbytes
        if about.pop("crc32") != _checksum(about, arrays):
            raise ValueError("it has another checksum")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        logger.warning(
            f"{path} is damaged ({error}): it is removed, and the text is tokenized again"
        )
        path.unlink(missing_ok=True)
        return None
    offsets, tokens, *targets = arrays
    return Corpus(
        tokens=tokens,
        offsets=offsets,
        pad_id=text.tokenizer.eos_id,
        fingerprint=about["fingerprint"],
        files=tuple(text.files),
        targets=targets[0] if targets else None,
        characters=about.get("characters"),
    )


def _checksum(about: dict[str, Any], arrays: list[NDArray[Any]]) -> int:
    found = zlib.crc32(json.dumps(about, sort_keys=True).encode())
    for array in arrays:
        found = zlib.crc32(array.view(np.uint8).data, found)
    return found


def _save(corpus: Corpus, path: Path) -> None:
    arrays: list[NDArray[Any]] = [corpus.offsets, corpus.tokens]
    about = {
        "documents": corpus.documents,
        "tokens": corpus.size,
        "dtype": corpus.tokens.dtype.str,
        "fingerprint": corpus.fingerprint,
        "characters": corpus.characters,
    }
    if corpus.targets is not None:
        about["targets"] = True
        arrays.append(corpus.targets)
    header = json.dumps({**about, "crc32": _checksum(about, arrays)}).encode()
    partial = path.with_suffix(".partial")
    try:
        with new_file(partial) as file:
            file.write(header.ljust(_HEADER_BYTES))
            for array in arrays:
                file.write(array.view(np.uint8).data)
            sync(file)
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
