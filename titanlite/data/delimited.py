"""Rows of CSV and TSV files with a header, by pyarrow.

A file is read in blocks that end with a row. So a row may be as long as a line of JSON, and no
thread reads ahead. A quoted field may hold line breaks, delimiters and doubled quotes (RFC 4180).
"""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from titanlite.data import DataError
from titanlite.data.compression import DamagedError
from titanlite.data.records import Columns, cut, strings_of
from titanlite.utils import pip_install

#: Bytes of a block, and of the longest row.
_BLOCK = 1 << 20
_LONGEST = 256 << 20
#: Rows that become Python objects at once.
_BATCH = 128
#: Bytes of the longest header.
_HEADER = 1 << 20
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


class _Header(NamedTuple):
    """The delimiter of a file and the names of its columns."""

    delimiter: str
    names: list[str]


class _Row(NamedTuple):
    """A row whose number of fields is not that of the header. `number`: in its block, from 1."""

    number: int
    fields: int
    text: str


def csv_rows(
    content: io.BufferedReader[Any], name: Path | str, columns: Columns, start: int
) -> Iterator[tuple[int, Sequence[Any]]]:
    """Iterate over number, text and perhaps prompt of the rows from `start` on.

    The first row after the header has number 1. Empty lines have none. Rows before `start` are
    parsed and not decoded.

    Raises DataError, with the row, for a missing column or a row of another length. An open quote
    and bytes that are not UTF-8 raise it, too.
    """
    try:
        import pyarrow
    except ImportError:
        raise DataError(
            f"{name}: reading CSV needs the package pyarrow: {pip_install('pyarrow')}"
        ) from None
    first_row = _first_row(content, name)
    if not first_row:
        return
    header = _header(first_row, columns, name)
    before = 0
    try:
        for block in _blocks(content, header.delimiter, name):
            table = _parsed(block, header, columns, name, before)
            for first in range(max(start - before, 0), table.num_rows, _BATCH):
                part = table.slice(first, _BATCH)
                yield from _rows_of(part, before + first + 1, columns, name)
            before += table.num_rows
    except pyarrow.lib.ArrowException as error:
        raise DamagedError(str(error)) from error


# The header


def _first_row(content: io.BufferedReader[Any], name: Path | str) -> bytes:
    """Return the first row that is not empty; b"" for a file without one."""
    row = content.readline(_HEADER).removeprefix(_BYTE_ORDER_MARK)
    while row and not row.strip(b"\r\n"):
        row = content.readline(_HEADER)
    while row.count(b'"') % 2:
        more = content.readline(_HEADER)
        row += more
        if not more or len(row) > _HEADER:
            break
    if not row.endswith(b"\n") and len(row) >= _HEADER:
        raise DataError(f"{name}: the header has more than 1 MB; the first row names the columns")
    row = row.rstrip(b"\r\n")
    if b"\r" in re.sub(rb'"[^"]*"', b"", row):
        raise DataError(
            f"{name}: its lines end with a carriage return alone: tr '\\r' '\\n' < FILE > NEW"
        )
    return row


def _header(row: bytes, columns: Columns, name: Path | str) -> _Header:
    """Return the header of a file. Raises DataError where it does not name the wanted columns.

    The delimiter is a tab in .tsv, else a comma. Another one that names these columns serves, too.
    Where none names all of them, it is the one that finds most names.
    """
    try:
        text = row.decode()
    except UnicodeDecodeError as error:
        raise DataError(
            f"{name}, header: not UTF-8 ({error.reason}): iconv -f ENCODING -t UTF-8 FILE > NEW"
        ) from error
    delimiters = ",\t;"
    if ".tsv" in Path(str(name).lower()).suffixes:
        delimiters = "\t,;"
    headers = [_Header(one, _fields(text, one, name)) for one in delimiters]
    fitting = [one for one in headers if {*columns.wanted} <= {*one.names}]
    header = max(fitting or headers, key=lambda one: len({*columns.fields} & {*one.names}))
    columns.check(header.names, f"{name}: the header")
    return header


def _read(header: _Header, columns: Columns) -> list[str]:
    """Return the columns that are read: at least one, so that rows are counted."""
    return [one for one in header.names if one in columns.fields] or header.names[:1]


def _fields(row: str, delimiter: str, name: Path | str) -> list[str]:
    """Return the fields of a header. Raises DataError where a stray quote has joined it with rows
    behind it.
    """
    try:
        rows = list(csv.reader(io.StringIO(row, newline=""), delimiter=delimiter))
    except csv.Error:
        return [row]
    if len(rows) > 1:
        raise DataError(
            f"{name}: a quote in the header has no end: {cut(row)}; double it, within quotes"
        )
    return rows[0]


# Blocks


class _End(NamedTuple):
    """Where the last whole row of some bytes ends, and whether a quoted field is open behind it."""

    place: int
    is_open: bool


def _blocks(content: io.BufferedReader[Any], delimiter: str, name: Path | str) -> Iterator[bytes]:
    """Iterate over the rows after the header, in blocks of whole rows."""
    sign = delimiter.encode()
    left = b""
    while True:
        more = content.read(max(_BLOCK, len(left)))
        left += more
        if len(left) > _LONGEST:
            raise DataError(
                f"{name}: the row that begins {cut(left[:80])} has more than "
                f"{_LONGEST >> 20} MB; end its quotes, or cut it up"
            )
        end = _end_by_count(left, sign) or _end_by_fields(left, sign)
        if more:
            if end.place:
                yield left[: end.place]
                left = left[end.place :]
            continue
        if end.is_open:
            raise DataError(
                f"{name}: the file ends within a quoted field of this row: "
                f"{cut(left[end.place : end.place + 80])}; end the quotes, or copy the file again"
            )
        if left:
            yield left
        return


def _end_by_count(content: bytes, delimiter: bytes) -> _End | None:
    """Return the end of the rows where each quote begins, ends or doubles: a line ends a row if the
    number of quotes before it is even.

    None: a field without quotes around it holds one.
    """
    signs = np.frombuffer(content, dtype=np.uint8)
    quotes = np.flatnonzero(signs == ord('"'))
    begins = quotes[::2]
    before = signs[begins[begins > 0] - 1]
    if not np.isin(before, list(b'\r\n"' + delimiter)).all():
        return None
    place = content.rfind(b"\n")
    while place >= 0:
        number = int(quotes.searchsorted(place))
        if number % 2 == 0:
            break
        # The lines of this field end no row.
        place = content.rfind(b"\n", 0, int(quotes[number - 1]))
    return _End(place + 1, len(quotes) % 2 == 1)


def _end_by_fields(content: bytes, delimiter: bytes) -> _End:
    """Return the end of the rows, field by field: a quote counts at the begin of a field alone."""
    quoted_or_end = re.compile(
        rb'"(?:(?<=\A")|(?<=[\r\n%s]"))[^"]*(?:""[^"]*)*("?)|\n' % re.escape(delimiter)
    )
    place = 0
    is_open = False
    for found in quoted_or_end.finditer(content):
        if found[0] == b"\n":
            place = found.end()
        else:
            is_open = not found[1]
    return _End(place, is_open)


def _parsed(block: bytes, header: _Header, columns: Columns, name: Path | str, before: int) -> Any:
    """Return the wanted columns of a block of rows, in bytes. before: rows before it."""
    import pyarrow
    from pyarrow import csv as reader

    bad: list[_Row] = []

    def note(row: Any) -> str:
        bad.append(_Row(row.number, row.actual_columns, row.text))
        return "error"

    read = _read(header, columns)
    if not block.strip(b"\r\n"):
        return pyarrow.table({one: pyarrow.array([], pyarrow.binary()) for one in read})
    try:
        return reader.read_csv(
            pyarrow.BufferReader(block),
            reader.ReadOptions(
                use_threads=False, block_size=len(block) + 1, column_names=header.names
            ),
            reader.ParseOptions(
                delimiter=header.delimiter, newlines_in_values=True, invalid_row_handler=note
            ),
            reader.ConvertOptions(
                include_columns=read,
                column_types=dict.fromkeys(read, pyarrow.binary()),
                strings_can_be_null=False,
            ),
        )
    except pyarrow.lib.ArrowInvalid:
        if not bad:
            raise
        row = bad[0]
        raise DataError(
            f"{name}, row {before + row.number}: {row.fields} fields, and the header has "
            f"{len(header.names)}: {cut(row.text)}; put a field that holds {header.delimiter!r} "
            "into quotes"
        ) from None


def _rows_of(
    part: Any, begin: int, columns: Columns, name: Path | str
) -> Iterator[tuple[int, Sequence[Any]]]:
    """Iterate over the rows of a part of a table. begin: number of the first."""
    names = part.schema.names
    values = [column.to_pylist() for column in part.columns]
    for number, row in enumerate(zip(*values, strict=True), begin):
        where = f"{name}, row {number}"
        record = {}
        for field, value in zip(names, row, strict=True):
            text = _decoded(value, field, where)
            record[field] = _list_of(text, field, where) if field in columns.lists else text
        yield number, strings_of(record, columns, where)


def _decoded(value: bytes, field: str, where: str) -> str:
    try:
        return value.decode()
    except UnicodeDecodeError as error:
        raise DataError(
            f"{where}: the field {field!r} is not UTF-8 ({error.reason}): {cut(value)}; "
            "iconv -f ENCODING -t UTF-8 FILE > NEW"
        ) from error


def _list_of(text: str, field: str, where: str) -> Any:
    """Return what a field says in JSON."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DataError(
            f"{where}: the field {field!r} must hold JSON, as json.dumps writes it ({error}): "
            f"{cut(text)}"
        ) from error
