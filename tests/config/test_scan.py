"""The key-position scanner against the parser, on generated documents."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from titanlite.config.toml import Scan, TOMLDecodeError, join, loads

FUZZ = settings(max_examples=250, deadline=None)


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


#: Parts of a document: text with `@` for a fresh name, and what is on each of its lines, from the part's first line.
PAIRS = [
    ("@ = 1\n", {"@": 0}),
    ("  @ . sub.'odd key'\t= -1_000  # [no] = {\n", {"@": 0, "@.sub": 0, '@.sub."odd key"': 0}),
    ('@ = """\nkey = 1\n[no]\n\\"""""\n', {"@": 0}),
    ("@ = '''x = [\n'''''\r\n", {"@": 0}),
    (
        "@ = [ # a\n  1,\n\n  [1979-05-27 07:32:00, ']'],\n]\n",
        {"@": 0, "@[0]": 1, "@[1]": 3, "@[1][0]": 3, "@[1][1]": 3},
    ),
    (
        '@ = { a.b = "}", c = [\n{ d = 3.5e-4 } ] }\n',
        {p: 0 for p in ("@", "@.a", "@.a.b", "@.c")} | {"@.c[0]": 1, "@.c[0].d": 1},
    ),
    ('# a [comment] = "x\n\n', {}),
    ("\r\n", {}),
]
HEADERS = [
    ("[@]\n", "@", {"@": 0}),
    ('[ @ . "a.b" ]  # x\n', '@."a.b"', {"@": 0, '@."a.b"': 0}),
    ("[[@]]\n", "@[0]", {"@": 0, "@[0]": 0}),
    ("[[@]]\n[[ @ ]]\n", "@[1]", {"@": 0, "@[0]": 0, "@[1]": 1}),
    ("[[@]]\n\n[@.in]\n", "@[0].in", {"@": 0, "@[0]": 0, "@[0].in": 2}),
    ("[[@]]\n[[@.in]]\n[[@.in]]\n", "@[0].in[1]", {"@": 0, "@[0]": 0, "@[0].in": 1, "@[0].in[0]": 1, "@[0].in[1]": 2}),
]


@st.composite
def documents(draw: st.DrawFn) -> tuple[str, dict[str, int]]:
    """Return a random valid document, and the line of each of its keys."""
    text, table, lines = "", "", dict[str, int]()
    for number, (part, *inside, names) in enumerate(draw(st.lists(st.sampled_from([*PAIRS, *HEADERS]), max_size=12))):
        first, fresh = text.count("\n") + 1, f"k{number}"
        table = f"{inside[0].replace('@', fresh)}." if inside else table
        above = "" if inside else table
        lines |= {above + name.replace("@", fresh): first + below for name, below in names.items()}
        text += part.replace("@", fresh)
    return text, lines


@FUZZ
@given(documents())
def test_scanner_finds_every_key_of_the_parser_on_the_line_it_was_written_on(document):
    text, lines = document
    assert set(lines) == set(map(full_name, paths_of(loads(text))))
    assert Scan(text).lines == lines


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
