"""TOML text: parse it, find the line of each key, write values. Parsers for TOML give values, but no positions."""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from typing import Any

from msgspec import Struct
from msgspec.structs import asdict

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

loads = tomllib.loads
TOMLDecodeError = tomllib.TOMLDecodeError


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


def join(path: str, name: str) -> str:
    """Return the full name of a key in a table."""
    return f"{path}.{quote_key(name)}" if path else quote_key(name)


@dataclass(frozen=True)
class Statement:
    """A header or a `key = value` of a text, with offsets into it."""

    #: "[", "[[" or "=".
    kind: str
    #: From the root to the value, without indices.
    names: tuple[str, ...]
    start: int
    #: Where the value begins; of a header, its end.
    value: int
    end: int


class Scan:
    """Positions in a text that the parser has accepted; this finds places and does not judge.

    lines: full name of every key → its line, from 1. Arrays add an index: `data.source[1].weight`, `data.source[1]`. A
    table is on the line of its header, or of the first key that names it.
    statements: headers and pairs in their order.
    """

    def __init__(self, text: str) -> None:
        self.text, self.lines, self.statements = text, dict[str, int](), list[Statement]()
        self._at = 0
        #: Arrays of tables → number of elements so far.
        self._elements: dict[str, int] = {}
        table: tuple[str, tuple[str, ...]] = ("", ())
        while self._take(_SPACE) and self._at < len(text):
            if text[self._at] == "[":
                table = self._header()
            else:
                self.statements.append(self._pair(*table))

    def _take(self, pattern: re.Pattern[str]) -> re.Match[str]:
        """Move past a match at the position."""
        match = pattern.match(self.text, self._at)
        assert match is not None
        self._at = match.end()
        return match

    def _line(self) -> int:
        return self.text.count("\n", 0, self._at) + 1

    def _key(self) -> tuple[str, ...]:
        """Move past a dotted key."""
        found: list[str] = []
        while not found or self.text.startswith(".", self._at):
            self._at += bool(found)
            word = self._take(_NAME)[1]
            found.append(next(iter(loads(f"{word} = 0"))) if word[:1] in ("'", '"') else word)
        return tuple(found)

    def _header(self) -> tuple[str, tuple[str, ...]]:
        line, start = self._line(), self._at
        kind = "[[" if self.text.startswith("[[", start) else "["
        self._at += len(kind)
        names = self._key()
        self._at += len(kind)
        path = ""
        for name in names[:-1]:
            path = join(path, name)
            self.lines.setdefault(path, line)
            if path in self._elements:
                path += f"[{self._elements[path] - 1}]"
        path = join(path, names[-1])
        if kind == "[[":
            self.lines.setdefault(path, line)
            self._elements[path] = self._elements.get(path, 0) + 1
            path += f"[{self._elements[path] - 1}]"
        self.lines[path] = line
        self.statements.append(Statement(kind, names, start, self._at, self._at))
        return path, names

    def _pair(self, path: str, names: tuple[str, ...]) -> Statement:
        line, start = self._line(), self._at
        for name in (key := self._key()):
            path = join(path, name)
            self.lines.setdefault(path, line)
        self._take(_EQUALS)
        value = self._at
        self._value(path)
        return Statement("=", names + key, start, value, value + len(self.text[value : self._at].rstrip()))

    def _value(self, path: str) -> None:
        first = self.text[self._at]
        if first not in "[{":
            self._take(_STRING if first in "\"'" else _SCALAR)
            return
        self._at += 1
        index = 0
        while self._take(_GAP) and self.text[self._at] not in "]}":
            if first == "{":
                self._pair(path, ())
                continue
            self.lines.setdefault(f"{path}[{index}]", self._line())
            self._value(f"{path}[{index}]")
            index += 1
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
