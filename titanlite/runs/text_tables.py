"""Tables and styles of commands and reports, for a terminal or a file."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from titanlite.utils import escape_name


@dataclass(frozen=True)
class Style:
    """ANSI styles, or none without a terminal."""

    color: bool

    def _wrap(self, code: str, text: str) -> str:
        return f"\x1b[{code}m{text}\x1b[0m" if self.color and text else text

    def bold(self, text: str) -> str:
        return self._wrap("1", text)

    def dim(self, text: str) -> str:
        return self._wrap("2", text)

    def good(self, text: str) -> str:
        return self._wrap("32", text)

    def warn(self, text: str) -> str:
        return self._wrap("33", text)


@dataclass(frozen=True)
class Table:
    """`rows` hold one text per column; `left` are the columns aligned to the left."""

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    left: Sequence[int] = (0,)
    title: str = ""


def render(table: Table, terminal: bool | None = None) -> str:
    """The table as text, control characters escaped, with a bold head in a terminal.

    terminal: None: whether standard output is one, unless NO_COLOR or TERM=dumb.
    """
    if terminal is None:
        terminal = sys.stdout.isatty()
    terminal = terminal and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
    lines = [[escape_name(text) for text in line] for line in (table.columns, *table.rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]

    def align(i: int, text: str) -> str:
        return text.ljust(widths[i]) if i in table.left else text.rjust(widths[i])

    def joined(line: Sequence[str]) -> str:
        return "  ".join(align(i, text) for i, text in enumerate(line)).rstrip()

    head, *body = lines
    shown = [Style(terminal).bold(joined(head)), *map(joined, body)]
    if table.title:
        shown.insert(0, escape_name(table.title))
    return "\n".join(shown)
