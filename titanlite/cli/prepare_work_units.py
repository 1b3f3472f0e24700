"""The text that `titanlite data prepare` reads, divided into tasks; the same ones for any number of
processes.
"""

from __future__ import annotations

import hashlib
import io
import itertools
import json
import os
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, BinaryIO, Literal, NamedTuple

from titanlite.config.dataset_registry import hub_text
from titanlite.config.urls import is_url, public_name
from titanlite.data import DataError
from titanlite.data.file_kinds import Format
from titanlite.data.formats import iter_rows, plain_kind
from titanlite.data.listing import Place
from titanlite.data.local_files import list_text
from titanlite.data.prepared_tokens import VERSION
from titanlite.data.records import Columns, Record
from titanlite.data.remote import url_to_fs, words
from titanlite.data.stream_files import hub_files, url_text
from titanlite.data.text_files import BUNDLED, TextFiles
from titanlite.data.tokenizer import Tokenizer

#: Bytes of text to a token, a low guess.
_LOW = 3


class Options(NamedTuple):
    """Settings that decide the tokens, besides the text. format: None: by content."""

    tokenizer_path: str
    columns: Columns
    part_tokens: int
    format: Format | None = None

    def to_json(self) -> dict[str, Any]:
        columns = self.columns
        found: dict[str, Any] = {
            "tokenizer_path": self.tokenizer_path,
            "text_key": None,
            "prompt_key": columns.prompt,
            "completion_key": None,
            "part_tokens": self.part_tokens,
        }
        if columns.chat is not None:
            found |= {"messages_key": columns.text, "chat": json.loads(json.dumps(columns.chat))}
        elif columns.prompt is None:
            found["text_key"] = columns.text
        else:
            found["completion_key"] = columns.text
        if self.format:
            found["format"] = self.format
        return found


class Piece(NamedTuple):
    """A file, or a range of its bytes or rows. `about`: whether the file is still the same."""

    name: str
    about: tuple[Any, ...]
    #: Bytes; 0: not known.
    size: int
    unit: Literal["file", "bytes", "rows"] = "file"
    first: int = 0
    end: int = 0


class Task(NamedTuple):
    """Text that one process tokenizes at a time. `stamp`: hash of all that decides its tokens."""

    number: int
    pieces: tuple[Piece, ...]
    stamp: str


def hash_of(value: Any) -> str:
    """Return the SHA-256 of a value as JSON with sorted keys."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def list_source(source: str, options: Options, subset: str | None, split: str | None) -> TextFiles:
    """List the files of a source. Raises DataError if there are none."""
    text = None if os.path.exists(source.partition("/")[0]) else hub_text(source)
    kind = options.format or "auto"
    shards = TextFiles((), options.columns, kind, key="SOURCE")
    if text is not None:
        names, revision, kind = hub_files(text, subset, split, "SOURCE")
        return replace(shards, names=tuple(names), revision=revision, kind=kind)
    if subset:
        raise DataError(f"--subset is of data sets of the hub, and {source} is none")
    bundled = None if os.path.exists(source) else BUNDLED.get(source)
    place = Place(str(bundled or source), "SOURCE", split, kind)
    listing = url_text(place) if is_url(source) else list_text(place)
    return replace(shards, names=listing.files, listing=None if bundled else listing)


def divide(shards: TextFiles, options: Options, tokenizer: Tokenizer) -> list[Task]:
    """Group neighbouring files, and cut large ones, so that a task makes about one part."""
    most = options.part_tokens * _LOW
    groups: list[list[Piece]] = []
    room = 0
    for piece in itertools.chain.from_iterable(
        _pieces(name, shards, most) for name in shards.names
    ):
        size = piece.size or most * is_url(piece.name)
        if not groups or size > room:
            groups.append([])
            room = most
        groups[-1].append(piece)
        room -= size
    decisive = [VERSION, options.to_json() | {"tokenizer_path": None}, tokenizer.fingerprint]
    return [
        Task(n, tuple(group), hash_of([*decisive, [piece[1:] for piece in group]]))
        for n, group in enumerate(groups)
    ]


def _about(name: str) -> tuple[Any, ...]:
    """Return path, size and version. Raises DataError if the file cannot be asked for."""
    try:
        if not is_url(name):
            stat = os.stat(name)
            return os.path.realpath(name), stat.st_size, stat.st_mtime_ns
        if name.startswith("hf://") and "@" in name:  # the name has the revision
            return name, 0, ""
        system, path = url_to_fs(name)
        about = system.info(path)
    except Exception as error:
        raise DataError(f"SOURCE: {public_name(name)} cannot be read: {words(error)}") from error
    return (
        public_name(name),
        about.get("size") or 0,
        str(about.get("ETag") or about.get("LastModified")),
    )


def _pieces(name: str, shards: TextFiles, most: int) -> list[Piece]:
    """Return ranges of about `most` bytes: lines of JSON, row groups of parquet."""
    about = _about(name)
    size: int = about[1]
    unit: Literal["file", "bytes", "rows"] = "file"
    borders = [0, size]
    if size > most and not is_url(name):
        with open(name, "rb") as file:
            kind = plain_kind(file, name)
            if kind is not None and shards.kind != "auto":
                kind = shards.kind
            if kind == "json":
                unit = "bytes"
                for place in range(most, size, most):
                    file.seek(place - 1)
                    file.readline()
                    borders.append(file.tell())
            elif kind == "parquet":
                from pyarrow.parquet import ParquetFile

                unit = "rows"
                metadata = ParquetFile(file).metadata
                groups = range(metadata.num_row_groups)
                ends = list(itertools.accumulate(metadata.row_group(n).num_rows for n in groups))
                wanted = range(0, metadata.num_rows, max(most * metadata.num_rows // size, 1))
                borders = [
                    0,
                    *(ends[bisect_left(ends, row)] for row in wanted if row),
                    metadata.num_rows,
                ]
    borders = sorted(set(borders))
    pieces = itertools.pairwise(borders)
    return [Piece(name, about, (b - a) * size // borders[-1], unit, a, b) for a, b in pieces] or [
        Piece(name, about, 0)
    ]


class _Section(io.RawIOBase):
    """The bytes [first, end) of an open file."""

    def __init__(self, file: BinaryIO, first: int, end: int) -> None:
        self._file = file
        self._left = end - first
        file.seek(first)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        content = self._file.read(min(len(buffer), self._left))
        buffer[: len(content)] = content
        self._left -= len(content)
        return len(content)


def records_of(shards: TextFiles, piece: Piece, start: int) -> Iterator[Record]:
    """Iterate over a piece's records after number `start`, in a range of bytes from its begin."""
    if piece.unit == "bytes":
        name = f"{piece.name} from byte {piece.first:,} on" if piece.first else piece.name
        with open(piece.name, "rb") as file:
            content = io.BufferedReader(_Section(file, piece.first, piece.end), 1 << 18)
            yield from iter_rows(content, name, "json", shards.columns, start)
    else:
        records = replace(shards, names=(piece.name,)).records(0, max(start, piece.first))
        yield from itertools.takewhile(
            lambda one: piece.unit == "file" or one.number <= piece.end, records
        )
    if not is_url(piece.name) and _about(piece.name) != piece.about:
        raise DataError(f"{piece.name} has changed while it was read; run the same command again")
