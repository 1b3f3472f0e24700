"""On which line each key of a TOML text is: parsers for it give values, but no positions.

The text must already have been accepted by the parser; this only finds places, it does not judge.
"""

from __future__ import annotations

import bisect
import sys
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

Path = tuple["str | int", ...]

_ESCAPES = {"b": "\b", "t": "\t", "n": "\n", "f": "\f", "r": "\r", '"': '"', "\\": "\\", "e": "\x1b"}
_HEX_ESCAPES = {"u": 4, "U": 8, "x": 2}


def loads(text: str) -> dict[str, Any]:
    """Parse TOML; raises `tomllib.TOMLDecodeError`."""
    return tomllib.loads(text)


TOMLDecodeError = tomllib.TOMLDecodeError


def key_lines(text: str) -> dict[Path, int]:
    """Path of every key → its line, counted from 1.

    A path has the key's names, and the index wherever it goes through an array: the weight of the second
    `[[data.source]]` is ("data", "source", 1, "weight"). A table is on the line of its header, or of the
    first key that names it.
    """
    return Scanner(text).scan()


class Scanner:
    """Walks over a TOML text; `at` is where it stands."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.at = 0
        self.lines: dict[Path, int] = {}
        self.elements: dict[Path, int] = {}
        self.newlines = [i for i, c in enumerate(text) if c == "\n"]

    def scan(self) -> dict[Path, int]:
        table: Path = ()
        while self.skip(" \t\r\n", comments=True):
            line = self.line()
            if self.text.startswith("[[", self.at):
                table = self.header(2, line)
            elif self.text[self.at] == "[":
                table = self.header(1, line)
            else:
                self.pair(table)
        return self.lines

    def line(self) -> int:
        return bisect.bisect_left(self.newlines, self.at) + 1

    def skip(self, blanks: str, comments: bool = False) -> bool:
        """Move past blanks (and comments); False at the end of the text."""
        while self.at < len(self.text):
            if self.text[self.at] in blanks:
                self.at += 1
            elif comments and self.text[self.at] == "#":
                end = self.text.find("\n", self.at)
                self.at = len(self.text) if end < 0 else end
            else:
                return True
        return False

    def header(self, brackets: int, line: int) -> Path:
        self.at += brackets
        names = self.key()
        self.at += brackets
        path: Path = ()
        for name in names[:-1]:
            path += (name,)
            self.lines.setdefault(path, line)
            if path in self.elements:
                path += (self.elements[path],)
        path += (names[-1],)
        if brackets == 1:
            self.lines[path] = line
            return path
        self.lines.setdefault(path, line)
        self.elements[path] = self.elements.get(path, -1) + 1
        return (*path, self.elements[path])

    def key(self) -> list[str]:
        """A dotted key; stops at what follows it."""
        names = []
        while self.skip(" \t"):
            names.append(self.name())
            self.skip(" \t")
            if not self.text.startswith(".", self.at):
                break
            self.at += 1
        return names

    def name(self) -> str:
        if self.text[self.at] in "\"'":
            return self.string()
        start = self.at
        while self.at < len(self.text) and (self.text[self.at].isalnum() or self.text[self.at] in "-_"):
            self.at += 1
        return self.text[start : self.at]

    def pair(self, table: Path) -> None:
        line = self.line()
        path = table
        for name in self.key():
            path += (name,)
            self.lines.setdefault(path, line)
        self.at += 1  # the equals sign
        self.value(path)

    def value(self, path: Path) -> None:
        self.skip(" \t")
        first = self.text[self.at]
        if first in "\"'":
            self.string()
        elif first == "[":
            self.array(path)
        elif first == "{":
            self.inline_table(path)
        else:
            while self.at < len(self.text) and self.text[self.at] not in ",]}#\n":
                self.at += 1

    def array(self, path: Path) -> None:
        self.at += 1
        index = 0
        while self.skip(" \t\r\n,", comments=True) and self.text[self.at] != "]":
            self.value((*path, index))
            index += 1
        self.at += 1

    def inline_table(self, path: Path) -> None:
        self.at += 1
        while self.skip(" \t\r\n,", comments=True) and self.text[self.at] != "}":
            self.pair(path)
        self.at += 1

    def string(self) -> str:
        """Move past a string of any of the four kinds; the content of a one-line string."""
        quote = self.text[self.at]
        if self.text.startswith(quote * 3, self.at):
            self.at += 3
            while not self.text.startswith(quote * 3, self.at):
                self.at += 2 if quote == '"' and self.text[self.at] == "\\" else 1
            # Up to two quotes may stand directly before the closing three.
            while self.text.startswith(quote * 4, self.at):
                self.at += 1
            self.at += 3
            return ""
        self.at += 1
        content = []
        while self.text[self.at] != quote:
            if quote == '"' and self.text[self.at] == "\\":
                content.append(self.escape())
            else:
                content.append(self.text[self.at])
                self.at += 1
        self.at += 1
        return "".join(content)

    def escape(self) -> str:
        code = self.text[self.at + 1]
        self.at += 2
        if code in _HEX_ESCAPES:
            digits = self.text[self.at : self.at + _HEX_ESCAPES[code]]
            self.at += len(digits)
            return chr(int(digits, 16))
        return _ESCAPES[code]
