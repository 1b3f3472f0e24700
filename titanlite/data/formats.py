"""Rows of one file: JSON lines, parquet, arrow or text; gzip and zstd around lines and text.

The content decides the kind, not the name. A reader takes an open file, so it serves local files
and streams.
"""

from __future__ import annotations

import gzip
import io
import itertools
import json
import os
import re
import zlib
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, cast

from titanlite.config.urls import public_name
from titanlite.data import DamagedError, DataError
from titanlite.data.compression import decompressed, is_compressed
from titanlite.data.file_kinds import WHOLE, Format, is_csv, kind_of_name
from titanlite.data.records import Columns, Record, strings_of

_MAGIC: dict[bytes, Format] = {b"PAR1": "parquet", b"ARROW1": "arrow", b"\xff\xff\xff\xff": "arrow"}
#: First bytes of a file that tell its kind.
_HEAD = 4096
#: Bytes of the longest plain text or line. They are read whole.
_LONGEST = 256 << 20
_EXPECTED = "JSON lines, parquet, arrow or text in UTF-8, plain or compressed by gzip or zstd"
_TO_PARQUET = (
    "python -c 'import sys, pyarrow.csv as c, pyarrow.parquet as p; "
    "p.write_table(c.read_csv(sys.argv[1]), sys.argv[2])' FILE.csv FILE.parquet"
)

#: Number of a row, its text and perhaps its prompt.
_Rows = Iterator[tuple[int, Sequence[Any]]]


def iter_rows(
    file: BinaryIO,
    name: Path | str,
    kind: Format = "auto",
    columns: Columns | None = None,
    start: int = 0,
) -> Iterator[Record]:
    """Iterate over the records of an open file, in order.

    Args:
        file: at its first byte; the caller closes it. Parquet and arrow files need `seek`.
        kind: "auto" looks at the content. "text" and "source" are one document per file.
        start: rows to skip: to continue after a record, give its `number`. Lines are skipped
            unparsed, row groups of parquet unread.

    Raises DataError with file and line or row for content that cannot be read, or if a package is
    missing.
    """
    columns = columns or Columns()
    unit = "line"
    number = start
    try:
        content = decompressed(file, name)
        if kind == "auto":
            kind = _kind_of(content.peek(_HEAD), str(name))
        if kind in ("parquet", "arrow"):
            unit = "row"
        for number, strings in _rows_of(content, kind, name, columns, start):
            yield Record(name, number, *strings)
    except (EOFError, gzip.BadGzipFile, zlib.error, DamagedError) as error:
        how = "truncated" if isinstance(error, EOFError) else "damaged"
        raise DataError(
            f"{name}: {how} after {unit} {number} ({error}); copy the file again"
        ) from error
    except OSError as error:
        raise DataError(
            f"{name}: cannot be read after {unit} {number}: {error.strerror or error}"
        ) from error


def _rows_of(
    content: io.BufferedReader[Any], kind: Format, name: Path | str, columns: Columns, start: int
) -> _Rows:
    if kind in ("parquet", "arrow"):
        if not content.seekable():
            raise DataError(f"{name} is a {kind} file compressed by zstd; decompress it")
        from titanlite.data.tables import table_rows

        return table_rows(content, kind, name, columns, start)
    if kind not in WHOLE:
        lines = json_lines(content, name, start)
        return ((number, strings_of(record, columns, where)) for number, where, record in lines)
    if columns.chat is not None:
        raise DataError(
            f"{name}: a plain text holds no records; leave {columns.section}.messages_key out"
        )
    return _text_rows(content, name, start)


def read_file(
    name: Path | str,
    kind: Format,
    columns: Columns | None,
    start: int = 0,
    patience: float = 0.0,
) -> Iterator[Record]:
    """Iterate over the records of a local file or URL, see `iter_rows`, `remote.retried`."""
    try:
        file = _open(str(name), patience)
    except OSError as error:
        raise DataError(f"{name}: cannot be read: {error.strerror or error}") from error
    shown = public_name(name) if isinstance(name, str) else name
    with file:
        yield from iter_rows(file, shown, kind, columns, start)


def _open(name: str, patience: float) -> BinaryIO:
    if "://" not in name:
        return open(name, "rb")
    from titanlite.data.remote import open_file

    return cast(BinaryIO, open_file(name, patience))


def plain_kind(file: BinaryIO, name: str) -> Format | None:
    """Return an open file's kind; None if it is compressed. Raises DataError."""
    head = file.read(_HEAD)
    return None if is_compressed(head) else _kind_of(head, name)


def _kind_of(head: bytes, name: str) -> Format:
    """Only for plain text does the name decide."""
    for magic, kind in _MAGIC.items():
        if head.startswith(magic):
            return kind
    kind_of_this_name = kind_of_name(name)
    named = kind_of_this_name.reader if kind_of_this_name else None
    start = head.removeprefix(b"\xef\xbb\xbf").lstrip()
    if start.startswith(b"version https://git-lfs"):
        raise DataError(
            f"{name} is a pointer of Git LFS, not the file itself; fetch it with `git lfs pull`"
        )
    if named in ("parquet", "arrow") and head:
        raise DataError(f"{name} is no {named} file; copy it again")
    if b"\0" in head:
        raise DataError(f"{name} is a file of another kind; expected {_EXPECTED}")
    if named is not None:
        return named
    if is_csv(os.path.basename(name)):
        raise DataError(f"{name}: CSV is not read; write parquet: {_TO_PARQUET}")
    # An array is refused with the command that cuts it up.
    return "json" if re.match(rb"\{|\[\s*\{", start) else "text"


def json_lines(
    content: BinaryIO, name: Path | str, start: int = 0, unit: str = "record", most: int = _LONGEST
) -> Iterator[tuple[int, str, Any]]:
    """Yield the number of each line that is not blank, its place in words, and its JSON.

    Raises DataError naming the line, also if it has over `most` bytes.
    """
    lines = iter(partial(content.readline, most + 1), b"")
    for number, line in enumerate(itertools.islice(lines, start, None), start + 1):
        if not line.strip():
            continue
        where = f"{name}, line {number}"
        if len(line) > most:
            raise DataError(f"{where}: a {unit} has {most >> 20} MB at most; cut it up")
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise DataError(
                f"{where}: not valid JSON ({error}); expected one {unit} per line. Of an array "
                f"`jq -c '.[]'` writes them"
            ) from error
        yield number, where, record


def _text_rows(content: BinaryIO, name: Path | str, start: int) -> _Rows:
    text = content.read(_LONGEST + 1)
    if len(text) > _LONGEST:
        raise DataError(f"{name} is read whole, and has more than {_LONGEST >> 20} MB; cut it up")
    try:
        if text.strip() and not start:
            yield 1, [text.decode("utf-8-sig")]
    except UnicodeDecodeError as error:
        line = text.count(b"\n", 0, error.start) + 1
        raise DataError(
            f"{name}, line {line}: not UTF-8 ({error.reason}); expected {_EXPECTED}"
        ) from error
