"""Rows of one file: JSON lines, parquet, arrow or plain text; gzip and zstd around lines and text.

The content decides the kind, not the name. A reader takes an open file, so it serves local files
and streams alike.
"""

from __future__ import annotations

import gzip
import io
import itertools
import json
import re
import zlib
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple, cast

from titanlite.config.urls import public_name
from titanlite.data import DataError
from titanlite.data.kinds import Format, kind_of_name

if TYPE_CHECKING:
    from titanlite.data.chat import ChatTemplate

_MAGIC: dict[bytes, Format] = {b"PAR1": "parquet", b"ARROW1": "arrow", b"\xff\xff\xff\xff": "arrow"}
_GZIP, _ZSTD = b"\x1f\x8b", b"\x28\xb5\x2f\xfd"
_BUFFER = 1 << 18
#: Rows of a table that become Python objects at once.
_BATCH = 128
#: Bytes of the longest plain text or line, which is read whole.
_LONGEST = 256 << 20
_EXPECTED = "JSON lines, parquet, arrow or text in UTF-8, plain or compressed by gzip or zstd"


class Record(NamedTuple):
    """One document and its place: `number` counts a file's lines or rows, or a function's
    documents, from 1.
    """

    #: The file or its URL; of a function its dotted path.
    file: Path | str
    number: int
    text: str
    #: Comes before the text; the model reads it and is not trained on it. None: the text is a
    #: rendered conversation, see `titanlite.data.chat`.
    prompt: str | None = ""


class Columns(NamedTuple):
    """The fields of a record that are read."""

    text: str = "text"
    #: Comes before the text; None: there are no prompts.
    prompt: str | None = None
    #: Of the config, for the keys in errors.
    section: str = "data"
    #: `text` holds messages, which it renders.
    chat: ChatTemplate | None = None

    @property
    def wanted(self) -> tuple[str, ...]:
        return (self.text,) if self.prompt is None else (self.text, self.prompt)

    @property
    def has_masks(self) -> bool:
        """Whether not every token is a target."""
        return self.prompt is not None or self.chat is not None

    def remedy(self, column: str) -> str:
        key = (
            "prompt_key"
            if column == self.prompt
            else "text_key"
            if self.prompt is None
            else "completion_key"
        )
        key = "messages_key" if self.chat else key
        return f"name the field by {self.section}.{key}"


def iter_rows(
    file: BinaryIO,
    name: Path | str,
    kind: Format = "auto",
    columns: Columns | None = None,
    start: int = 0,
) -> Iterator[Record]:
    """Iterate over the records of an open file, in order.

    Args:
        file: at its first byte; the caller closes it. Parquet and arrow files (not arrow streams)
            need `seek`.
        name: path or URL, for errors and records.
        kind: "auto" looks at the content. "text" is one document per file.
        start: rows to leave out: to go on after a record, give its `number`. Lines are skipped
            unparsed, row groups of parquet unread.

    Raises DataError with file and line or row for content that cannot be read, is damaged,
    truncated, of another kind, or has no such string; and for a missing package.
    """
    columns = columns or Columns()
    unit, number = "line", start
    try:
        content = _decompressed(file, name)
        if kind == "auto":
            kind = _kind_of(content.peek(4096), str(name))
        if kind in ("parquet", "arrow"):
            if isinstance(content.raw, (gzip.GzipFile, _Zstd)):
                raise DataError(f"{name} is a compressed {kind} file; decompress it")
            unit = "row"
            rows = _table_rows(content, kind, name, columns, start)
        else:
            if kind == "text" and columns.chat is not None:
                raise DataError(
                    f"{name}: a plain text holds no messages; leave "
                    f"{columns.section}.messages_key out"
                )
            rows = (
                _text_rows(content, name, start)
                if kind == "text"
                else _json_rows(content, name, columns, start)
            )
        for number, strings in rows:
            yield Record(name, number, *strings)
    except (EOFError, gzip.BadGzipFile, zlib.error, _Damaged) as error:
        how = "truncated" if isinstance(error, EOFError) else "damaged"
        raise DataError(
            f"{name}: {how} after {unit} {number} ({error}); copy the file again"
        ) from error
    except OSError as error:
        raise DataError(
            f"{name}: cannot be read after {unit} {number}: {error.strerror or error}"
        ) from error


def read_file(
    name: Path | str,
    kind: Format = "auto",
    columns: Columns | None = None,
    start: int = 0,
    patience: float = 0.0,
) -> Iterator[Record]:
    """Iterate over the records of a local file or a URL, see `iter_rows` and, for `patience`,
    `remote.retried`.
    """
    try:
        file = _open(str(name), patience)
    except OSError as error:
        raise DataError(f"{name}: cannot be read: {error.strerror or error}") from error
    with file:
        yield from iter_rows(
            file, public_name(name) if isinstance(name, str) else name, kind, columns, start
        )


def _open(name: str, patience: float) -> BinaryIO:
    if "://" not in name:
        return open(name, "rb")
    from titanlite.data.remote import open_file

    return cast(BinaryIO, open_file(name, patience))


class _Damaged(Exception):
    """A library's reader says that the content is not whole."""


def _decompressed(file: Any, name: Path | str) -> io.BufferedReader[Any]:
    whole = file if isinstance(file, io.BufferedReader) else io.BufferedReader(file, _BUFFER)
    head = whole.peek(4)
    if head.startswith(_GZIP):
        return io.BufferedReader(gzip.GzipFile(fileobj=whole), _BUFFER)
    return io.BufferedReader(_Zstd(whole, name), _BUFFER) if head.startswith(_ZSTD) else whole


class _Zstd(io.RawIOBase):
    """Frames of zstd, one after the other.

    The library's own reader does not notice a truncated one.
    """

    def __init__(self, file: BinaryIO, name: Path | str) -> None:
        try:
            import zstandard
        except ImportError:
            raise DataError(
                f"{name}: reading zstd needs the package zstandard: pip install 'titanlite[data]'"
            ) from None
        self._file, self._error = file, zstandard.ZstdError
        self._new = zstandard.ZstdDecompressor(max_window_size=1 << 31).decompressobj
        self._frame, self._at_end = self._new(), True
        self._rest, self._out = b"", memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._out:
            piece = self._rest or self._file.read(_BUFFER)
            if not piece:
                if self._at_end:
                    return 0
                raise EOFError("the zstd frame has no end")
            try:
                self._out = memoryview(self._frame.decompress(piece))
            except self._error as error:
                raise _Damaged(str(error)) from error
            self._rest, self._at_end = self._frame.unused_data, self._frame.eof
            if self._at_end:
                self._frame = self._new()
        size = min(len(buffer), len(self._out))
        buffer[:size], self._out = self._out[:size], self._out[size:]
        return size


def plain_kind(file: BinaryIO, name: str) -> Format | None:
    """Return the kind of an open file; None for one that is compressed.

    Raises DataError as `iter_rows` does.
    """
    head = file.read(4096)
    return None if head.startswith((_GZIP, _ZSTD)) else _kind_of(head, name)


def _kind_of(head: bytes, name: str) -> Format:
    """Return the kind of a file by its first bytes.

    The name decides only where these are plain text.
    """
    for magic, kind in _MAGIC.items():
        if head.startswith(magic):
            return kind
    base = name.lower().removesuffix(".gz").removesuffix(".zst")
    kind_named = kind_of_name(name)
    named = kind_named.reader if kind_named else None
    start = head.removeprefix(b"\xef\xbb\xbf").lstrip()
    if start.startswith(b"version https://git-lfs"):
        raise DataError(
            f"{name} is a pointer of Git LFS, not the file itself; fetch it with `git lfs pull`"
        )
    if named in ("parquet", "arrow") and head:
        raise DataError(f"{name} is no {named} file; copy it again")
    if b"\0" in head or base.endswith((".csv", ".tsv")):
        raise DataError(f"{name} is a file of another kind; expected {_EXPECTED}")
    if named != "text" and re.match(rb"\[\s*\{", start):
        raise DataError(
            f"{name} is one JSON array; write each record on a line of its own: jq -c '.[]' FILE "
            "> FILE.jsonl"
        )
    return named or ("json" if start.startswith(b"{") else "text")


#: Number of a row, its text and perhaps its prompt.
_Rows = Iterator[tuple[int, Sequence[Any]]]


def strings_of(record: object, columns: Columns, where: str) -> list[Any]:
    """Return text and perhaps prompt of a record.

    Raises DataError that begins with `where` if one is no string.
    """
    if not isinstance(record, Mapping):
        problem = (
            f"expected a text, or a table with the key {columns.text!r}, found "
            f"{type(record).__name__}"
        )
        raise DataError(f"{where}: {problem}")
    if columns.chat is not None and columns.text in record:
        return [columns.chat.render(record[columns.text], where), None]
    for column in columns.wanted:
        if not isinstance(value := record.get(column), str):
            keys = f"is missing (keys: {', '.join(map(repr, record)) or 'none'})"
            problem = (
                f"must be a string, found {type(value).__name__}" if column in record else keys
            )
            raise DataError(f"{where}: the key {column!r} {problem}; {columns.remedy(column)}")
    return [record[column] for column in columns.wanted]


def _json_rows(content: BinaryIO, name: Path | str, columns: Columns, start: int) -> _Rows:
    lines = iter(partial(content.readline, _LONGEST + 1), b"")
    for number, line in enumerate(itertools.islice(lines, start, None), start + 1):
        if line.strip():
            where = f"{name}, line {number}"
            if len(line) > _LONGEST:
                raise DataError(f"{where}: a record has {_LONGEST >> 20} MB at most; cut it up")
            try:
                record = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise DataError(
                    f"{where}: not valid JSON ({error}); expected one record per line"
                ) from error
            yield number, strings_of(record, columns, where)


def _text_rows(content: BinaryIO, name: Path | str, start: int) -> _Rows:
    """Iterate over the one document of a file."""
    text = content.read(_LONGEST + 1)
    if len(text) > _LONGEST:
        size = f"{_LONGEST >> 20} MB"
        raise DataError(
            f"{name}: a text file is one document, of {size} at most; cut it up, or write JSON "
            "lines"
        )
    try:
        if text.strip() and not start:
            yield 1, [text.decode("utf-8-sig")]
    except UnicodeDecodeError as error:
        line = text.count(b"\n", 0, error.start) + 1
        raise DataError(
            f"{name}, line {line}: not UTF-8 ({error.reason}); expected {_EXPECTED}"
        ) from error


def _table_rows(
    content: io.BufferedReader[Any], kind: Format, name: Path | str, columns: Columns, start: int
) -> _Rows:
    """Iterate over the rows of a parquet or arrow file, a batch at a time."""
    try:
        import pyarrow
    except ImportError:
        raise DataError(
            f"{name}: reading {kind} needs the package pyarrow: pip install 'titanlite[data]'"
        ) from None
    wanted = columns.wanted
    try:
        for before, batch in (_parquet if kind == "parquet" else _arrow)(content, wanted, start):
            if missing := [column for column in wanted if column not in batch.schema.names]:
                names = ", ".join(batch.schema.names)
                raise DataError(
                    f"{name}: no column {missing[0]!r} ({names}); {columns.remedy(missing[0])}"
                )
            for first in range(max(start - before, 0), batch.num_rows, _BATCH):
                part, begin = batch.slice(first, _BATCH), before + first + 1
                try:
                    values = [part.column(column).to_pylist() for column in wanted]
                except UnicodeDecodeError as error:
                    rows = f"rows {begin} to {begin + part.num_rows - 1}"
                    raise DataError(f"{name}, {rows}: not UTF-8 ({error.reason})") from error
                for number, row in enumerate(zip(*values, strict=True), begin):
                    if all(isinstance(value, str) for value in row) and columns.chat is None:
                        yield number, row
                    else:
                        yield (
                            number,
                            strings_of(
                                dict(zip(wanted, row, strict=True)),
                                columns,
                                f"{name}, row {number}",
                            ),
                        )
    except pyarrow.lib.ArrowException as error:
        raise _Damaged(str(error)) from error
    except OSError as error:
        if (
            type(error) is OSError and error.errno is None
        ):  # pyarrow's own, for pages that cannot be decompressed
            raise _Damaged(str(error)) from error
        raise


def _parquet(content: BinaryIO, wanted: Sequence[str], start: int) -> Iterator[tuple[int, Any]]:
    """Iterate over (rows before, batch), without the row groups that end before `start`."""
    from pyarrow.parquet import ParquetFile

    # Read by pages: a whole column of a row group may be gigabytes.
    table = ParquetFile(
        content, buffer_size=_BUFFER, pre_buffer=False, page_checksum_verification=True
    )
    columns = list(wanted) if {*wanted} <= {*table.schema_arrow.names} else None
    before = 0
    for group in range(table.num_row_groups):
        rows = table.metadata.row_group(group).num_rows
        if before + rows > start:
            seen = before
            for batch in table.iter_batches(_BATCH, [group], columns, use_threads=False):
                yield seen, batch
                seen += batch.num_rows
        before += rows


def _arrow(
    content: io.BufferedReader[Any], _: Sequence[str], start: int
) -> Iterator[tuple[int, Any]]:
    from pyarrow import ipc

    is_file = content.peek(6).startswith(b"ARROW1")
    reader = ipc.open_file(content) if is_file else ipc.open_stream(content)
    before = 0
    for batch in map(reader.get_batch, range(reader.num_record_batches)) if is_file else reader:
        yield before, batch
        before += batch.num_rows
