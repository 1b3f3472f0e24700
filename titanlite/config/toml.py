"""TOML text: parse it, find its statements and their lines, write values.

The parser gives values, but no positions.
"""

from __future__ import annotations

import re
import sys
from typing import Any

from msgspec import Struct
from msgspec.structs import asdict

from titanlite.utils import refuse_depth

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

TOMLDecodeError = tomllib.TOMLDecodeError


def loads(text: str) -> dict[str, Any]:
    """Return the tables of a TOML text. Raises TOMLDecodeError, also if nested too deeply or too
    long.
    """
    try:
        tree = tomllib.loads(text)
        refuse_depth(tree)
    except TOMLDecodeError:
        raise
    except RecursionError:
        raise TOMLDecodeError("its lists and tables are nested too deeply") from None
    except ValueError as error:  # a number of too many digits
        raise TOMLDecodeError(str(error)) from None
    return tree


def quote(value: Any) -> str:
    """Return a value as TOML writes it; None is `none`."""
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        escaped = value.replace("\\", "\\\\").replace('"', '\\"')
        for raw, code in (("\n", "\\n"), ("\r", "\\r"), ("\t", "\\t")):
            escaped = escaped.replace(raw, code)
        characters = []
        for one in escaped:
            if not one.isprintable():
                one = f"\\U{ord(one):08x}"
            characters.append(one)
        return f'"{"".join(characters)}"'
    if isinstance(value, Struct):
        value = {name: item for name, item in asdict(value).items() if item is not None}
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(map(quote, value)) + "]"
    if isinstance(value, dict):
        return (
            "{"
            + ", ".join(f"{quote_key(name)} = {quote(item)}" for name, item in value.items())
            + "}"
        )
    return str(value)


def quote_key(name: str) -> str:
    """Return a key as TOML writes it: bare where it can be."""
    return name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else quote(name)


def join(path: str, name: str) -> str:
    """Return the full name of a key in a table."""
    return f"{path}.{quote_key(name)}" if path else quote_key(name)


#: Is on the last line of each statement of several lines: the end of an array, a table or a text.
_LAST = re.compile(r"[\]}]|\"{3}|'{3}")


def scan(text: str) -> dict[str, int]:
    """Return full name → line of each table and key of a text that the parser accepts.

    A statement is the shortest run of lines that the parser accepts. Arrays of tables have an
    index: `data.source[1].weight`. A table is on the line of its header, or of its first key.
    """
    scanner = _Scanner(text)
    for end in range(1, len(scanner.lines) + 1):
        scanner.end_at(end)
    return scanner.numbers


class _Scanner:
    def __init__(self, text: str) -> None:
        self.lines = text.replace("\r\n", "\n").split("\n")
        #: Full name → line, from 1.
        self.numbers: dict[str, int] = {}
        #: Full name of an array of tables → index of its last table so far.
        self._indices: dict[str, int] = {}
        self._table = ""
        #: Index of the first line that belongs to no statement yet.
        self._start = 0

    def end_at(self, end: int) -> None:
        """Take the lines up to `end` (exclusive) as a statement, if the parser accepts them."""
        if end - self._start > 1 and not _LAST.search(self.lines[end - 1]):
            return  # else the time grows with the square of a list's length
        chunk = "\n".join(self.lines[self._start : end])
        try:
            tree = loads(chunk)
        except TOMLDecodeError:
            return
        is_header = bool(tree) and chunk.lstrip().startswith("[")
        if is_header:
            self._table = self._enter("", tree, is_header)
            self.numbers[self._table] = self._start + 1
        else:
            self._enter(self._table, tree, is_header)
        self._start = end

    def _enter(self, path: str, tree: dict[str, Any], is_header: bool) -> str:
        """Note the lines of a tree's names; return the last full name."""
        last = path
        for name, value in tree.items():
            last = join(path, name)
            self.numbers.setdefault(last, self._start + 1)
            if is_header and isinstance(value, list):
                self._indices[last] = self._indices.get(last, -1) + 1
            if last in self._indices:
                last += f"[{self._indices[last]}]"
            if isinstance(value, dict):
                last = self._enter(last, value, is_header)
        return last
