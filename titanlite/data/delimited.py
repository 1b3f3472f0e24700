"""Rows of CSV and TSV files with a header, by the standard library's csv.

A quoted field may hold line breaks, delimiters and doubled quotes (RFC 4180). A quote within an
unquoted field is a part of it.
"""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from titanlite.data import DataError
from titanlite.data.records import Columns, cut, strings_of

#: Most bytes of a line, and characters of a field.
_LONGEST = 256 << 20
#: Bytes of the longest header.
_HEADER = 1 << 20
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


class _Header(NamedTuple):
    """The delimiter of a file and the names of its columns."""

    delimiter: str
    names: list[str]


def csv_rows(
    content: io.BufferedReader[Any], name: Path | str, columns: Columns, start: int
) -> Iterator[tuple[int, Sequence[Any]]]:
    """Iterate over number, text and perhaps prompt of the rows from `start` on.

    The first row after the header has number 1. Empty lines have none.

    Raises DataError, with the row, for a missing column or a row of another length. An open quote
    and bytes that are not UTF-8 raise it, too.
    """
    first_row = _first_row(content, name)
    if not first_row:
        return
    header = _header(first_row, columns, name)
    read = [(place, one) for place, one in enumerate(header.names) if one in columns.fields]
    number = 0
    for number, row in enumerate(_rows(content, header, name), 1):
        where = f"{name}, row {number}"
        if len(row) != len(header.names):
            raise DataError(
                f"{where}: {len(row)} fields, and the header has {len(header.names)}: "
                f"{cut(header.delimiter.join(row))}; put a field that holds "
                f"{header.delimiter!r} into quotes"
            )
        if number > start:
            record = {field: _value(row[place], field, columns, where) for place, field in read}
            yield number, strings_of(record, columns, where)


def _rows(
    content: io.BufferedReader[Any], header: _Header, name: Path | str
) -> Iterator[list[str]]:
    """Iterate over the rows behind the header. Bytes that are not UTF-8 become lone surrogates."""
    at_end = False

    def lines() -> Iterator[str]:
        nonlocal at_end
        while line := content.readline(_LONGEST + 1):
            if len(line) > _LONGEST:
                raise csv.Error("a line is too long")
            yield line.decode("utf-8", "surrogateescape")
        at_end = True

    # The limit is one of the process.
    csv.field_size_limit(_LONGEST)
    reader = csv.reader(lines(), delimiter=header.delimiter)
    number = 0
    try:
        for row in reader:
            if not row:
                continue
            # The reader has asked for a line to end this row.
            if at_end:
                shown = cut(header.delimiter.join(row)[:80])
                raise DataError(
                    f"{name}: the file ends within a quoted field of this row: {shown}; end the "
                    "quotes, or copy the file again"
                )
            number += 1
            yield row
    except csv.Error as error:
        raise DataError(
            f"{name}, row {number + 1}: {error}; end its quotes, cut fields of more than "
            f"{_LONGEST >> 20} MB, and write lines that end with \\n"
        ) from error


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


def _value(value: str, field: str, columns: Columns, where: str) -> Any:
    """Return a field as text, or what it says in JSON where it holds a list."""
    try:
        text = value.encode("utf-8", "surrogateescape").decode()
        return json.loads(text) if field in columns.lists else text
    except UnicodeDecodeError as error:
        raise DataError(
            f"{where}: the field {field!r} is not UTF-8 ({error.reason}): {cut(error.object)}; "
            "iconv -f ENCODING -t UTF-8 FILE > NEW"
        ) from error
    except (ValueError, RecursionError) as error:
        raise DataError(
            f"{where}: the field {field!r} must hold JSON, as json.dumps writes it ({error}): "
            f"{cut(text)}"
        ) from error
