"""Lines of the keys of a text, against the parser, on generated documents."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from titanlite.config.toml import loads, scan

#: Parts of a document: text with `@` for a fresh name, and what is on each of its lines, from the
#: part's first line.
PAIRS = [
    ("@ = 1\n", {"@": 0}),
    ("  @ . sub.'odd key'\t= -1_000  # [no] = {\n", {"@": 0, "@.sub": 0, '@.sub."odd key"': 0}),
    ('@ = """\nkey = 1\n[no]\n\\"""""\n', {"@": 0}),
    ("@ = '''x = [\n'''''\r\n", {"@": 0}),
    ("@ = [ # a\n  1,\n\n  [1979-05-27 07:32:00, ']'],\n]\n", {"@": 0}),
    ("@ = [{ a = 1 },\n  { a = 2 }]\n", {"@": 0}),
    ("@.sub = [ 1, 2, # ]\n[\n3,\n],\n'''4\n]''', 5,\n6\n]\n", {"@": 0, "@.sub": 0}),
    (
        '@ = { a.b = "}", c = [\n{ d = 3.5e-4 } ] }\n',
        dict.fromkeys(("@", "@.a", "@.a.b", "@.c"), 0),
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
    (
        "[[@]]\n[[@.in]]\n[[@.in]]\n",
        "@[0].in[1]",
        {"@": 0, "@[0]": 0, "@[0].in": 1, "@[0].in[0]": 1, "@[0].in[1]": 2},
    ),
]


@st.composite
def documents(draw: st.DrawFn) -> tuple[str, dict[str, int]]:
    """Return a random valid document, and the line of each of its keys."""
    text = ""
    table = ""
    lines = dict[str, int]()
    for number, (part, *inside, names) in enumerate(
        draw(st.lists(st.sampled_from([*PAIRS, *HEADERS]), max_size=12))
    ):
        first = text.count("\n") + 1
        fresh = f"k{number}"
        table = f"{inside[0].replace('@', fresh)}." if inside else table
        above = "" if inside else table
        lines |= {above + name.replace("@", fresh): first + below for name, below in names.items()}
        text += part.replace("@", fresh)
    return text, lines


@settings(max_examples=150, deadline=None)
@given(documents())
def test_each_key_is_found_on_its_line(document):
    text, lines = document
    loads(text)
    assert scan(text) == lines
