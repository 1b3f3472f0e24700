"""Tables for people: drawn by rich on a terminal, aligned plain text in a pipe."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from titanlite.observe.console import escape

if TYPE_CHECKING:
    from rich.text import Text


@dataclass(frozen=True)
class Table:
    """`rows` hold one text per column; `left` are the columns aligned to the left."""

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    left: Sequence[int] = (0,)
    title: str = ""


def render(table: Table, terminal: bool) -> str:
    """The table as text without a final line end. Control characters in it are escaped."""
    columns, *rows = [[escape(text) for text in row] for row in (table.columns, *table.rows)]
    table = replace(table, columns=columns, rows=rows, title=escape(table.title))
    return _rich(table) if terminal else _plain(table)


def _plain(table: Table) -> str:
    lines = [table.columns, *table.rows]
    widths = [max(len(line[i]) for line in lines) for i in range(len(table.columns))]

    def align(i: int, text: str) -> str:
        return text.ljust(widths[i]) if i in table.left else text.rjust(widths[i])

    body = ["  ".join(align(i, text) for i, text in enumerate(line)).rstrip() for line in lines]
    return "\n".join([table.title, *body] if table.title else body)


def _rich(table: Table) -> str:
    from rich import box
    from rich.console import Console
    from rich.table import Table as RichTable
    from rich.text import Text

    drawn = RichTable(title=table.title or None, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for i, name in enumerate(table.columns):
        drawn.add_column(Text(name), justify="left" if i in table.left else "right", overflow="fold")
    for row in table.rows:
        drawn.add_row(*map(_cell, row))
    console = Console()
    with console.capture() as capture:
        console.print(drawn)
    return "\n".join(line for line in capture.get().splitlines() if line.strip())


_STATE_COLORS = {
    **{"running": "blue", "done": "green", "died": "red", "failed": "red"},
    **{"stopped by guard": "yellow", "preempted": "yellow"},
}


def _cell(text: str) -> Text:
    from rich.text import Text

    return Text(text, style=_STATE_COLORS.get(text, ""))
