"""Records of one JSON array, as `json.dump` of a list writes it."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from titanlite.data import DataError
from titanlite.data.records import Columns, cut, strings_of

_SPACE = re.compile(r"[ \t\n\r]*")
_parse = json.JSONDecoder().raw_decode
#: Bytes of the longest array, which is read whole.
_LONGEST = 2 << 30


def array_rows(
    content: io.BufferedReader[Any], name: Path | str, columns: Columns, start: int
) -> Iterator[tuple[int, Sequence[Any]]]:
    """Iterate over number, text and perhaps prompt of the records from `start` on.

    Raises DataError with file and record for what is no JSON array of records, and for text behind
    it.
    """
    for number, record in enumerate(_records(content, name), 1):
        if number > start:
            yield number, strings_of(record, columns, f"{name}, record {number}")


def _records(content: io.BufferedReader[Any], name: Path | str) -> Iterator[Any]:
    """Iterate over the records, which become Python objects one by one."""
    number = 0
    try:
        found = content.read(_LONGEST + 1)
        if len(found) > _LONGEST:
            raise DataError(
                f"{name}: a JSON array has {_LONGEST >> 20} MB at most; write a record per line"
            )
        text = found.decode("utf-8-sig")
        place = _behind_space(text, text.index("[") + 1)
        sign = "]" if text.startswith("]", place) else ","
        while sign == ",":
            number += 1
            record, end = _parse(text, _behind_space(text, place))
            yield record
            place = _behind_space(text, end) + 1
            sign = text[place - 1 : place]
        if sign != "]":
            raise ValueError(f"expected , at {cut(text[place - 1 : place + 79])}")
    except UnicodeDecodeError as error:
        raise DataError(f"{name}, record {number}: not UTF-8 ({error.reason})") from error
    except (ValueError, RecursionError) as error:
        raise DataError(f"{name}, record {number}: not valid JSON ({error})") from error
    if number and text[place:].strip():
        raise DataError(
            f"{name}, record {number}: text follows the array: expected one array, or a record per "
            "line"
        )


def _behind_space(text: str, place: int) -> int:
    """Return the next place that is no white space."""
    found = _SPACE.match(text, place)
    assert found is not None
    return found.end()
