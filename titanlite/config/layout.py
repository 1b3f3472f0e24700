"""A TOML text as blocks of keys with their comments, so that keys can be renamed and moved without losing a comment.

The text must already have been accepted by the parser.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from titanlite.config.scan import Path, Scanner


@dataclass
class Item:
    """One `key = value`."""

    #: Comments and blank lines between what stands before and this key.
    above: list[str]
    indent: str
    #: The key as written, and its names.
    key: str
    names: tuple[str, ...]
    #: The value as written, over as many lines as it takes.
    value: str
    #: The equals sign with its blanks.
    between: str = " = "
    #: What follows the value on its last line: blanks and a comment.
    tail: str = ""
    #: Counted from 1; 0 for what was not in the text.
    line: int = 0

    def lines(self) -> list[str]:
        return [*self.above, *f"{self.indent}{self.key}{self.between}{self.value}{self.tail}".split("\n")]

    def split_above(self) -> tuple[list[str], list[str]]:
        """What stands apart above the key, and the comment that belongs to it: the lines since the last blank one."""
        start = len(self.above)
        while start and self.above[start - 1].strip():
            start -= 1
        return self.above[:start], self.above[start:]


@dataclass
class Remark:
    """Lines that hold no key."""

    text: list[str]

    def lines(self) -> list[str]:
        return self.text


@dataclass
class Block:
    """What stands under one header; the first block of a text has none."""

    above: list[str]
    #: The header's line as written, with its comment; empty for none.
    header: str
    names: tuple[str, ...] = ()
    is_array: bool = False
    parts: list[Item | Remark] = field(default_factory=list)
    #: Where values of this block lie in the parsed tree.
    path: Path = ()
    line: int = 0
    #: The comment behind the header.
    comment: str = ""

    def items(self) -> Iterator[Item]:
        return (part for part in self.parts if isinstance(part, Item))

    def lines(self) -> list[str]:
        own = [*self.above, *([self.header] if self.header else [])]
        return [*own, *(line for part in self.parts for line in part.lines())]


@dataclass
class Layout:
    """The blocks of a text in their order."""

    blocks: list[Block]

    def text(self) -> str:
        return "".join(f"{line}\n" for block in self.blocks for line in block.lines())


def parse(text: str) -> Layout:
    """The layout of a TOML text with `\\n` line ends; `Layout.text` gives the text back (with a last line end)."""
    return _Reader(text).layout()


class _Reader(Scanner):
    """Cuts the text at its statements; `gap` holds the lines since the last one."""

    def layout(self) -> Layout:
        block = Block([], "")
        blocks = [block]
        gap = self._gap(0)
        while self.skip(" \t\r\n", comments=True):
            start, line = self.at, self.line()
            indent = self.text[self.text.rfind("\n", 0, start) + 1 : start]
            if self.text[start] == "[":
                is_array = self.text.startswith("[[", start)
                path = self.header(2 if is_array else 1, line)
                apart, own = _divide(gap)
                if apart:
                    block.parts.append(Remark(apart))
                end = self._line_end(self.at)
                names = tuple(name for name in path if isinstance(name, str))
                comment = self.text[self.at : end].strip()
                block = Block(
                    own, indent + self.text[start:end], names, is_array, path=path, line=line, comment=comment
                )
                blocks.append(block)
            else:
                block.parts.append(self._item(gap, indent, line))
            self.at = self._line_end(self.at)
            gap = self._gap(self.at + 1)
        if gap:
            block.parts.append(Remark(gap))
        return Layout(blocks)

    def _item(self, above: list[str], indent: str, line: int) -> Item:
        start = self.at
        names = tuple(self.key())
        key = self.text[start : self.at].rstrip()
        self.at += 1  # the equals sign
        self.skip(" \t")
        value_start = self.at
        self.value(())
        value = self.text[value_start : self.at].rstrip()
        between = self.text[start + len(key) : value_start]
        tail = self.text[value_start + len(value) : self._line_end(self.at)]
        return Item(above, indent, key, names, value, between, tail, line)

    def _line_end(self, at: int) -> int:
        end = self.text.find("\n", at)
        return len(self.text) if end < 0 else end

    def _gap(self, position: int) -> list[str]:
        """The lines of comments and blanks from a line's start on."""
        lines: list[str] = []
        while position < len(self.text):
            stop = self._line_end(position)
            line = self.text[position:stop]
            if line.strip() and not line.lstrip().startswith("#"):
                break
            lines.append(line)
            position = stop + 1
        return lines


def _divide(gap: list[str]) -> tuple[list[str], list[str]]:
    """The lines above a header that belong to what stands before it, and those that are the header's own."""
    start = len(gap)
    while start and gap[start - 1].strip():
        start -= 1
    while start and not gap[start - 1].strip():
        start -= 1
    return gap[:start], gap[start:]
