"""Records of one JSON array, as `json.dump` of a list writes it, read one by one."""

from __future__ import annotations

import codecs
import io
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from titanlite.data import DataError
from titanlite.data.records import Columns, cut, strings_of

#: Bytes that are read at once, and characters of the longest record.
_PIECE = 1 << 20
_LONGEST = 256 << 20
#: Characters of the longest word and escape of JSON, which a piece may cut.
_WORD = 12


def array_rows(
    content: io.BufferedReader[Any], name: Path | str, columns: Columns, start: int
) -> Iterator[tuple[int, Sequence[Any]]]:
    """Iterate over number, text and perhaps prompt of the records from `start` on.

    Raises DataError with file and record for what is no JSON array of records, and for text behind
    it.
    """
    for number, record in enumerate(_Array(content, name).records(), 1):
        if number > start:
            yield number, strings_of(record, columns, f"{name}, record {number}")


class _Array:
    """An array that is read in pieces."""

    def __init__(self, content: io.BufferedReader[Any], name: Path | str) -> None:
        self._content = content
        self._name = name
        self._parse = json.JSONDecoder().raw_decode
        self._decoder = codecs.getincrementaldecoder("utf-8-sig")()
        #: Text that was read, and the place in it that was reached.
        self._text = ""
        self._place = 0
        #: Records so far.
        self._number = 0

    def records(self) -> Iterator[Any]:
        """Iterate over the records."""
        self._take("[")
        if self._next_sign() != "]":
            yield self._record()
        while self._next_sign() != "]":
            self._take(",")
            yield self._record()
        self._take("]")
        if self._next_sign():
            raise self._error("text follows the array: expected one array, or a record per line")

    def _record(self) -> Any:
        """Return the next record."""
        self._number += 1
        self._next_sign()
        while True:
            try:
                record, end = self._parse(self._text, self._place)
            except RecursionError as error:
                raise self._error(f"not valid JSON ({error})") from error
            except json.JSONDecodeError as error:
                if self._may_go_on(error) and self._read():
                    continue
                raise self._error(f"not valid JSON ({error.msg})") from error
            # A number may go on, too.
            is_open = isinstance(record, (int, float)) and end == len(self._text)
            if is_open and self._read():
                continue
            self._place = end
            return record

    def _may_go_on(self, error: json.JSONDecodeError) -> bool:
        """Return whether a record may be valid with more text behind it."""
        is_in_string = error.msg.startswith("Unterminated string")
        return is_in_string or error.pos >= len(self._text) - _WORD

    def _take(self, sign: str) -> None:
        if self._next_sign() != sign:
            there = cut(self._text[self._place : self._place + 80])
            raise self._error(f"not valid JSON (expected {sign} at {there})")
        self._place += 1

    def _next_sign(self) -> str:
        """Pass over white space; return the next character, "" at the end."""
        while True:
            rest = self._text[self._place : self._place + 1]
            if rest.isspace():
                self._place += 1
            elif rest or not self._read():
                return rest

    def _read(self) -> bool:
        """Read more text; return whether there was any."""
        left = len(self._text) - self._place
        if left > _LONGEST:
            raise self._error(f"a record has {_LONGEST >> 20} MB at most; cut it up")
        content = self._content.read(max(_PIECE, left))
        try:
            more = self._decoder.decode(content, final=not content)
        except UnicodeDecodeError as error:
            raise self._error(f"not UTF-8 ({error.reason})") from error
        self._text = self._text[self._place :] + more
        self._place = 0
        return bool(content)

    def _error(self, problem: str) -> DataError:
        return DataError(f"{self._name}, record {self._number}: {problem}")
