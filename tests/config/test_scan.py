"""The key-position scanner against the parser, on generated documents."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from hypothesis import assume, given, settings
from hypothesis import strategies as st

from titanlite.config.toml import Scan, TOMLDecodeError, join, loads

FUZZ = settings(max_examples=250, deadline=None)
TRICKY = " .#=[]{},'\"\\\t-_aé漢\n"


def paths_of(value: Any, path: tuple = ()) -> Iterator[tuple]:
    """Every path in a parsed document."""
    for part, item in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield (*path, part)
        yield from paths_of(item, (*path, part))


def full_name(path: tuple) -> str:
    """A path as messages show it: `data.source[1].weight`."""
    name = ""
    for part in path:
        name = f"{name}[{part}]" if isinstance(part, int) else join(name, part)
    return name


def basic(text: str) -> str:
    """A one-line basic string."""
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n").replace("é", "\\u00e9")
    return f'"{escaped}"'


class Writer:
    """Writes a random valid document, and notes on which line it put each key."""

    def __init__(self, draw: st.DrawFn) -> None:
        self.draw = draw
        self.text = ""
        self.lines: dict[tuple, int] = {}
        self.count = 0
        self.tables: list[tuple] = []
        self.arrays: dict[tuple, int] = {}
        self.array_names: dict[tuple, list[str]] = {}

    def pick(self, *options: Any) -> Any:
        return self.draw(st.sampled_from(options))

    def line(self) -> int:
        return self.text.count("\n") + 1

    def name(self) -> tuple[str, str]:
        """A fresh name, and how it is written."""
        self.count += 1
        kind = self.pick("bare", "basic", "literal")
        if kind == "bare":
            name = self.draw(st.text("abz019-_", max_size=4)) + str(self.count)
            return name, name
        if kind == "basic":
            name = self.draw(st.text(TRICKY, max_size=6)) + str(self.count)
            return name, basic(name)
        name = self.draw(st.text(TRICKY.replace("'", "").replace("\n", ""), max_size=6)) + str(self.count)
        return name, f"'{name}'"

    def dot(self) -> str:
        return self.pick(".", " . ", ".\t")

    def blank(self) -> None:
        """Blank lines and comments, between statements and inside arrays."""
        self.text += self.pick("", "", "\n", "  \n", '# a [comment] = "x" {\n', "\r\n", "#\n\n")

    def pair(self, table: tuple) -> None:
        line, path = self.line(), table
        for index in range(self.pick(1, 1, 1, 2, 3)):
            name, written = self.name()
            self.text += (self.dot() if index else "") + written
            path += (name,)
            self.lines.setdefault(path, line)
        self.text += self.pick("=", " = ", "\t=")
        self.value(path, depth=0)

    def value(self, path: tuple, depth: int) -> None:
        kinds = ["scalar", "basic", "literal", "multi", "multi literal"] + (
            ["array", "inline"] * 2 if depth < 3 else []
        )
        kind = self.pick(*kinds)
        if kind == "scalar":
            self.text += self.pick(
                "1", "-1_000", "3.5e-4", "true", "inf", "1979-05-27T07:32:00Z", "1979-05-27 07:32:00"
            )
        elif kind == "basic":
            self.text += basic(self.draw(st.text(TRICKY, max_size=8)))
        elif kind == "literal":
            self.text += "'" + self.draw(st.text(TRICKY.replace("'", "").replace("\n", ""), max_size=8)) + "'"
        elif kind == "multi":
            body = self.draw(st.text(TRICKY.replace('"', ""), max_size=12)).replace("\\", "\\\\")
            self.text += '"""' + body + self.pick("", '\\"', '""', '"x', "\\\n   ", "\nkey = 1\n[no]\n") + '"""'
        elif kind == "multi literal":
            self.text += "'''" + self.draw(st.text(TRICKY.replace("'", ""), max_size=12)) + self.pick("", "''") + "'''"
        elif kind == "array":
            self.text += "["
            for index in range(self.pick(0, 1, 2, 3)):
                self.blank()
                self.lines[(*path, index)] = self.line()
                self.value((*path, index), depth + 1)
                self.blank()
                self.text += ","
            self.blank()
            self.text += "]"
        else:
            self.text += "{"
            for index in range(self.pick(0, 1, 2)):
                self.text += ", " if index else " "
                self.inline_pair(path, depth + 1)
            self.text += " }"

    def inline_pair(self, path: tuple, depth: int) -> None:
        line = self.line()
        for index in range(self.pick(1, 1, 2)):
            name, written = self.name()
            self.text += (self.dot() if index else "") + written
            path += (name,)
            self.lines.setdefault(path, line)
        self.text += " = "
        self.value(path, depth)

    def header(self) -> tuple:
        """A new table or array of tables, below the root or below an earlier one; or one more element."""
        line = self.line()
        if self.array_names and self.pick(True, False):
            array = self.pick(*self.array_names)
            parts = self.array_names[array]
            self.text += f"[[{'.'.join(parts)}]]"
            self.arrays[array] += 1
            self.lines[(*array, self.arrays[array])] = line
            return (*array, self.arrays[array])
        path, written = self.pick(*([((), [])] + [(a, w) for a, w in self.array_names.items()]))
        if path:
            path = (*path, self.arrays[path])
        is_array = self.pick(True, False)
        parts = list(written)
        for _ in range(self.pick(1, 2)):
            name, text = self.name()
            path, parts = (*path, name), [*parts, text]
            self.lines.setdefault(path, line)
        joined = self.dot().join(parts)
        self.text += f"[[ {joined} ]]" if is_array else f"[{joined}]"
        if not is_array:
            return path
        self.lines[(*path, 0)] = line
        if not any(isinstance(part, int) for part in path):
            self.arrays[path] = 0
            self.array_names[path] = parts
        return (*path, 0)

    def document(self) -> None:
        table: tuple = ()
        for _ in range(self.draw(st.integers(1, 12))):
            self.blank()
            self.text += self.pick("", " ", "\t")
            if self.pick("pair", "pair", "header") == "header":
                table = self.header()
            else:
                self.pair(table)
            self.text += self.pick("\n", "  # a comment = [\n", " \r\n")
        self.blank()


@st.composite
def documents(draw: st.DrawFn) -> tuple[str, dict[tuple, int]]:
    writer = Writer(draw)
    writer.document()
    return writer.text, writer.lines


@FUZZ
@given(documents())
def test_scanner_finds_every_key_of_the_parser_on_the_line_it_was_written_on(document):
    text, lines = document
    # A tab or newline that a literal may not hold makes a few documents invalid; the parser decides.
    try:
        tree = loads(text)
    except TOMLDecodeError:
        assume(False)
    found = Scan(text).lines
    assert set(found) == set(map(full_name, paths_of(tree)))
    assert found == {full_name(path): line for path, line in lines.items()}


@settings(max_examples=500, deadline=None)
@given(
    st.lists(
        st.sampled_from(["a", "b", "[", "]", "[[", "]]", ".", "=", "1", '"', "'", '"""', "#", "\n", "{", "}", ","])
    )
)
def test_scanner_agrees_with_the_parser_on_whatever_it_accepts(pieces):
    text = "".join(pieces)
    try:
        tree = loads(text)
    except TOMLDecodeError:
        return
    assert set(Scan(text).lines) == set(map(full_name, paths_of(tree)))


def test_lines_of_a_document_with_every_form():
    text = (
        "# comment\n"
        'top = """\n'
        "[not.a.header]\n"
        '"""\n'
        "\n"
        "[model.overrides]\n"
        "n_layers = 4\n"
        "[training]\n"
        "'seq_len' = 1\n"
        "a.b . c = [ # x = 1\n"
        "  1,\n"
        "  { k = 1 },\n"
        "]\n"
        "[[data.source]]\n"
        "path = 'x'\n"
        "[[data.source]]\n"
        "path = 'y'\n"
        "[data.source.more]\n"
        "z = 1\n"
    )
    assert Scan(text).lines == {
        "top": 2,
        "model": 6,
        "model.overrides": 6,
        "model.overrides.n_layers": 7,
        "training": 8,
        "training.seq_len": 9,
        "training.a": 10,
        "training.a.b": 10,
        "training.a.b.c": 10,
        "training.a.b.c[0]": 11,
        "training.a.b.c[1]": 12,
        "training.a.b.c[1].k": 12,
        "data": 14,
        "data.source": 14,
        "data.source[0]": 14,
        "data.source[0].path": 15,
        "data.source[1]": 16,
        "data.source[1].path": 17,
        "data.source[1].more": 18,
        "data.source[1].more.z": 19,
    }
