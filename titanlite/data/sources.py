"""Read documents: files of C4-format records (JSON lines with `text`, `timestamp`, `url`), or a function of yours.

A missing, empty or damaged source is an error that names it; nothing replaces the text.
"""

from __future__ import annotations

import gzip
import json
import logging
import os
import zlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from titanlite.config.extensions import load_function
from titanlite.data import DataError
from titanlite.utils import logger

#: Number of empty files that a warning names.
_NAMED = 3
_ASSETS = Path(__file__).parent / "assets"

#: Text that is bundled with titanlite, by data set name.
BUNDLED: dict[str, Path] = {
    "c4_test": _ASSETS / "train",
    "c4_validation": _ASSETS / "validation",
}

SUFFIXES = (".json", ".jsonl", ".json.gz", ".jsonl.gz")


class Record(NamedTuple):
    """One document and its place: `number` counts a file's lines, or a function's documents, from 1."""

    #: The file or its URL; of a function its dotted path.
    file: Path | str
    number: int
    text: str
    #: Comes before the text; the model reads it and is not trained on it.
    prompt: str = ""


def source_files(dataset: str, path: str | None, section: str = "training") -> list[Path]:
    """Return the files of a data set in reading order, by name. Rank 0 warns of empty ones.

    Args:
        dataset: a name in `BUNDLED`; any other needs a path.
        path: local file or folder of C4-format records; None: the bundled text.
        section: of the config, for the keys in errors.

    Raises DataError for text that is not bundled, a missing path, or one without such a file.
    """
    if path is None:
        if dataset not in BUNDLED:
            raise DataError(
                f'{section}.dataset: the text "{dataset}" is not bundled; set {section}.dataset_path to local files of '
                f"C4-format records, or take {' or '.join(BUNDLED)}"
            )
        return list_files(BUNDLED[dataset])
    files = list_files(Path(path), f"{section}.dataset_path")
    empty = [file for file in files if file.stat().st_size == 0]
    if empty and len(empty) < len(files):  # where all are empty, reading refuses them
        names = ", ".join(map(str, empty[:_NAMED])) + f" and {len(empty) - _NAMED} more" * (len(empty) > _NAMED)
        level = logging.INFO if os.environ.get("RANK", "0") != "0" else logging.WARNING
        count = f"{len(empty)} of {len(files)} files"
        logger.log(level, f"{section}.dataset_path: {count} are empty (0 bytes) and hold no text: {names}")
    return files


def list_files(path: Path, key: str = "training.dataset_path") -> list[Path]:
    """Return `path` itself if it is a file, else the record files directly in that folder, sorted by name.

    Raises DataError, naming the config's `key`, if there is none.
    """
    expected = ", ".join(SUFFIXES)
    if path.is_file():
        if not path.name.endswith(SUFFIXES):
            raise DataError(f"{key}: {path} is not a record file; expected a name in {expected}")
        return [path]
    if not path.is_dir():
        hint = f" (looked from {Path.cwd()}; ids of the Hugging Face hub are not built yet)"
        hint = "" if path.is_absolute() else hint
        raise DataError(f"{key}: {path} does not exist{hint}; give a file or folder of C4-format records")
    files = sorted(file for file in path.iterdir() if file.is_file() and file.name.endswith(SUFFIXES))
    if not files:
        raise DataError(f"{key}: the folder {path} holds no record files; expected names in {expected}")
    return files


def own_records(function: str, key: str) -> Iterator[Record]:
    """Iterate over the documents that a function of yours returns: texts, or tables with a `text`.

    function: its dotted path. It must return the same documents in the same order on each rank and at each start:
    a document's number is its place in the data order, and a checkpoint's fingerprint is of all texts.
    Raises DataError, naming the config's `key`, for a document without a text, and if there is none at all.
    """
    number = 0
    for number, document in enumerate(load_function(key, function)(), 1):
        text = document.get("text") if isinstance(document, Mapping) else document
        if not isinstance(text, str):
            what = f"{key}: document {number} of {function} is {document!r:.80}"
            raise DataError(f"{what}; expected a text, or a table with the key 'text'")
        yield Record(function, number, text)
    if not number:
        raise DataError(f"{key}: {function} returned no documents")


def iter_records(path: Path | Iterable[Path]) -> Iterator[Record]:
    """Iterate over the records of a file, a folder or a list of files, in order.

    Raises DataError with file and line for a line that is not a JSON object with a string `text`, for a damaged or
    truncated file, and if there is no record at all.
    """
    files = list_files(path) if isinstance(path, Path) else list(path)
    count = 0
    for file in files:
        for number, line in _lines(file):
            if line.strip():
                count += 1
                yield Record(file, number, _text(file, number, line))
    if not count:
        names = ", ".join(str(file) for file in files[:3]) + (", …" if len(files) > 3 else "")
        raise DataError(f"no records in {names}: the files are empty; give files of C4-format records")


def _lines(file: Path) -> Iterator[tuple[int, bytes]]:
    number = 0
    open_file = gzip.open if file.name.endswith(".gz") else open
    try:
        with open_file(file, "rb") as lines:
            for line in lines:
                number += 1
                yield number, line
    except EOFError:
        raise DataError(
            f"{file}: truncated after line {number}: the gzip stream has no end; copy the file again"
        ) from None
    except (gzip.BadGzipFile, zlib.error) as error:
        raise DataError(f"{file}: damaged gzip data after line {number} ({error}); copy the file again") from error
    except OSError as error:
        raise DataError(f"{file}: cannot be read after line {number}: {error.strerror or error}") from error


def _text(file: Path, number: int, line: bytes) -> str:
    where = f"{file}, line {number}"
    try:
        record = json.loads(line)
    except ValueError as error:
        raise DataError(f"{where}: not valid JSON ({error}); expected one C4-format record per line") from error
    if not isinstance(record, dict):
        raise DataError(f"{where}: expected a JSON object with the key 'text', found {type(record).__name__}")
    if "text" not in record:
        keys = ", ".join(map(repr, record)) or "none"
        raise DataError(f"{where}: the key 'text' is missing (keys: {keys})")
    if not isinstance(record["text"], str):
        raise DataError(f"{where}: the key 'text' must be a string, found {type(record['text']).__name__}")
    return record["text"]
