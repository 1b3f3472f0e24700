"""TOML text: parse it, find the line of each key, write values. Parsers for TOML give values, but no positions."""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass, field
from typing import Any

from msgspec import Struct
from msgspec.structs import asdict

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

loads = tomllib.loads
TOMLDecodeError = tomllib.TOMLDecodeError

Path = tuple["str | int", ...]
"""Names from the root to a value, and the index wherever the way goes through an array."""


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
        return '"' + "".join(c if c.isprintable() else f"\\u{ord(c):04x}" for c in escaped) + '"'
    if isinstance(value, Struct):
        value = {name: item for name, item in asdict(value).items() if item is not None}
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(map(quote, value)) + "]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{quote_key(name)} = {quote(item)}" for name, item in value.items()) + "}"
    return str(value)


def quote_key(name: str) -> str:
    """Return a key as TOML writes it: bare where it can be."""
    return name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else quote(name)


@dataclass(frozen=True)
class Statement:
    """A header or a `key = value` of a text, with offsets into it."""

    #: "[", "[[" or "=".
    kind: str
    #: Where its value lies in the parsed tree.
    path: Path
    #: The names as written in it.
    names: tuple[str, ...]
    start: int
    #: End of the key; of the header.
    key_end: int
    #: The value; empty at the header's end.
    value: int
    end: int


@dataclass
class Scan:
    """Positions in a text that the parser has accepted; this finds places and does not judge."""

    text: str
    #: Path of every key → its line, from 1. A table is on the line of its header, or of the first key that names it.
    lines: dict[Path, int] = field(default_factory=dict)
    statements: list[Statement] = field(default_factory=list)
    _at: int = 0
    #: Arrays of tables → index of the last element.
    _elements: dict[Path, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        table: Path = ()
        while self._take(_SPACE) and self._at < len(self.text):
            if self.text[self._at] == "[":
                table = self._header()
            else:
                self.statements.append(self._pair(table))

    def _take(self, pattern: re.Pattern[str]) -> re.Match[str]:
        """Move past a match at the position."""
        match = pattern.match(self.text, self._at)
        assert match is not None
        self._at = match.end()
        return match

    def _line(self) -> int:
        return self.text.count("\n", 0, self._at) + 1

    def _names(self) -> tuple[str, ...]:
        """Move past a dotted key."""
        found: list[str] = []
        while not found or self.text.startswith(".", self._at):
            self._at += bool(found)
            word = self._take(_NAME)[1]
            found.append(next(iter(loads(f"{word} = 0"))) if word[:1] in ("'", '"') else word)
        return tuple(found)

    def _header(self) -> Path:
        line, start = self._line(), self._at
        kind = "[[" if self.text.startswith("[[", start) else "["
        self._at += len(kind)
        names = self._names()
        self._at += len(kind)
        path: Path = ()
        for name in names[:-1]:
            path += (name,)
            self.lines.setdefault(path, line)
            if path in self._elements:
                path += (self._elements[path],)
        path += (names[-1],)
        if kind == "[":
            self.lines[path] = line
        else:
            self.lines.setdefault(path, line)
            self._elements[path] = self._elements.get(path, -1) + 1
            path += (self._elements[path],)
        self.statements.append(Statement(kind, path, names, start, self._at, self._at, self._at))
        return path

    def _pair(self, table: Path) -> Statement:
        line, start = self._line(), self._at
        names, path = self._names(), table
        key_end = start + len(self.text[start : self._at].rstrip())
        for name in names:
            path += (name,)
            self.lines.setdefault(path, line)
        self._take(_EQUALS)
        value = self._at
        self._value(path)
        end = value + len(self.text[value : self._at].rstrip())
        return Statement("=", path, names, start, key_end, value, end)

    def _value(self, path: Path) -> None:
        first = self.text[self._at]
        if first not in "[{":
            self._take(_STRING if first in "\"'" else _SCALAR)
            return
        self._at += 1
        index = 0
        while self._take(_GAP) and self.text[self._at] not in "]}":
            if first == "[":
                self._value((*path, index))
                index += 1
            else:
                self._pair(path)
        self._at += 1


_ANY_STRING = (
    r'"""(?:\\.|[^\\])*?"""(?:"{0,2})|' + r"'''.*?'''(?:'{0,2})" + r'|"(?:\\.|[^"\\])*"|' + r"'[^']*'"
)  # up to two quotes may stand directly before the closing three
_STRING = re.compile(_ANY_STRING, re.DOTALL)
_NAME = re.compile(rf"[ \t]*({_ANY_STRING}|[\w-]*)[ \t]*", re.DOTALL)
_SCALAR = re.compile(r"[^,\]}#\n]*")
_EQUALS = re.compile(r"=[ \t]*")
_SPACE = re.compile(r"(?:\s|#[^\n]*)*")
_GAP = re.compile(r"(?:[\s,]|#[^\n]*)*")
