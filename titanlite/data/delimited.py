"""Rows of CSV and TSV files with a header, by the standard library's csv.

A quoted field may hold line breaks, delimiters and doubled quotes (RFC 4180). A quote within an
unquoted field is a part of it.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from titanlite.data import DataError
from titanlite.data.records import Columns, cut, strings_of

#: Most characters of a field.
_LONGEST = 256 << 20


def csv_rows(
    content: io.BufferedReader[Any], name: Path | str, columns: Columns, start: int
) -> Iterator[tuple[int, Sequence[Any]]]:
    """Iterate over number, text and perhaps prompt of the rows from `start` on.

    The first row after the header has number 1. Empty lines have none. Bytes that are not UTF-8
    become lone surrogates, which `strings_of` refuses.

    Raises DataError, with the row, for a missing column, a row of another length or an open quote.
    """
    text = io.TextIOWrapper(content, "utf-8-sig", "surrogateescape", newline="")
    first = next((line for line in text if line.strip("\r\n")), "")
    if not first:
        return
    at_end = False

    def lines() -> Iterator[str]:
        nonlocal at_end
        yield first
        yield from text
        at_end = True

    delimiter = _delimiter(first, columns, name)
    # The limit is one of the process.
    csv.field_size_limit(_LONGEST)
    reader = csv.reader(lines(), delimiter=delimiter)
    number = 0
    try:
        names = [one.encode(errors="replace").decode() for one in next(reader)]
        columns.check(names, f"{name}: the header")
        read = [(place, one) for place, one in enumerate(names) if one in columns.fields]
        for row in filter(None, reader):
            # The reader has asked for a line to end this row.
            if at_end:
                raise csv.Error(f"the file ends within a quoted field of {cut(row)}")
            number += 1
            where = f"{name}, row {number}"
            if len(row) != len(names):
                raise DataError(
                    f"{where}: {len(row)} fields, and the header has {len(names)}: "
                    f"{cut(delimiter.join(row))}; put a field that holds {delimiter!r} into quotes"
                )
            if number > start:
                record = {field: _value(row[place], field, columns, where) for place, field in read}
                yield number, strings_of(record, columns, where)
    except csv.Error as error:
        raise DataError(
            f"{name}, row {number + 1}: {error}; end its quotes, and cut fields of more than "
            f"{_LONGEST >> 20} MB"
        ) from error


def _delimiter(first: str, columns: Columns, name: Path | str) -> str:
    """Return the delimiter of the header that finds most of the columns: a tab in .tsv, else a
    comma, where several find as many.
    """
    delimiters = "\t,;" if ".tsv" in Path(str(name).lower()).suffixes else ",\t;"

    def found(delimiter: str) -> int:
        return len({*columns.fields} & {*next(csv.reader([first], delimiter=delimiter))})

    return max(delimiters, key=found)


def _value(value: str, field: str, columns: Columns, where: str) -> Any:
    """Return a field as text, or what it says in JSON where it holds a list."""
    try:
        return json.loads(value) if field in columns.lists else value
    except (ValueError, RecursionError) as error:
        raise DataError(
            f"{where}: the field {field!r} must hold JSON, as json.dumps writes it ({error}): "
            f"{cut(value)}"
        ) from error
