"""Tables and styles of commands and reports, for a terminal or a file."""

from __future__ import annotations

import re
import sys
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass

from titanlite.utils import escape_name, wants_color

#: Words that `Style.wrap` keeps on one line: quoted strings, commands, lists, a key with its value.
_WHOLE = re.compile(r'"[^"\n]*"|`[^`\n]*`|\[[^][\n]*\]| = ')
#: Stands for a space in it.
_KEPT = "\0"


def unbroken(text: str) -> str:
    """Return a text that `Style.wrap` leaves on one line."""
    return text.replace(" ", _KEPT)


@dataclass(frozen=True)
class Style:
    """How text is shown: in ANSI styles on a terminal, and in lines of its width."""

    color: bool
    #: Columns; 0: lines stay as they are, as in a pipe or a file.
    width: int = 0

    def wrap(self, text: str, hanging: int = 4) -> str:
        """Return a text in lines of the width, each line's rest indented by `hanging` more.

        Words are not broken: a long path or value may be wider.
        """
        if not self.width:
            return text.replace(_KEPT, " ")
        lines = []
        for line in _WHOLE.sub(lambda found: unbroken(found[0]), text).split("\n"):
            words = line.lstrip()
            indent = line.removesuffix(words)
            lines += textwrap.wrap(
                words,
                self.width,
                initial_indent=indent,
                subsequent_indent=indent + " " * hanging,
                break_long_words=False,
                break_on_hyphens=False,
            )
        return "\n".join(lines).replace(_KEPT, " ")

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
        terminal = wants_color(sys.stdout)
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
