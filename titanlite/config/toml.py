"""TOML text: parse it, find its statements and their lines, write values.

The parser gives values, but no positions.
"""

from __future__ import annotations

import re
import sys
from contextlib import suppress
from typing import Any, NamedTuple

from msgspec import Struct
from msgspec.structs import asdict

from titanlite.utils import refuse_depth

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

TOMLDecodeError = tomllib.TOMLDecodeError


def loads(text: str) -> dict[str, Any]:
    """Return the tables of a TOML text.

    Raises TOMLDecodeError, also for what is nested too deeply or too long.
    """
    try:
        tree = tomllib.loads(text)
        refuse_depth(tree)
    except TOMLDecodeError:
        raise
    except RecursionError:
        raise TOMLDecodeError("its lists and tables are nested too deeply") from None
    except ValueError as error:  # a number of too many digits
        raise TOMLDecodeError(str(error)) from None
    return tree


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
        characters = []
        for one in escaped:
            if not one.isprintable():
                one = f"\\U{ord(one):08x}"
            characters.append(one)
        return f'"{"".join(characters)}"'
    if isinstance(value, Struct):
        value = {name: item for name, item in asdict(value).items() if item is not None}
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(map(quote, value)) + "]"
    if isinstance(value, dict):
        return (
            "{"
            + ", ".join(f"{quote_key(name)} = {quote(item)}" for name, item in value.items())
            + "}"
        )
    return str(value)


def quote_key(name: str) -> str:
    """Return a key as TOML writes it: bare where it can be."""
    return name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else quote(name)


def join(path: str, name: str) -> str:
    """Return the full name of a key in a table."""
    return f"{path}.{quote_key(name)}" if path else quote_key(name)


#: Is on the last line of each statement of several lines: the end of an array, a table or a text.
_LAST = re.compile(r"[\]}]|\"{3}|'{3}")


class Statement(NamedTuple):
    """A header, a `key = value`, a comment or a blank line."""

    #: Its text, on one line or more, and the number of its first line, from 1.
    text: str
    line: int
    #: What the parser makes of it alone; empty for comments and blank lines.
    tree: dict[str, Any]
    #: Full name of the table that it opens or stands in, with an index in arrays: `data.source[1]`.
    table: str
    is_header: bool


def scan(text: str) -> tuple[list[Statement], dict[str, int]]:
    """Return the statements of a text that the parser accepts, and full name → line of each table
    and key in it.

    A statement is the shortest run of lines that the parser accepts alone. Names in arrays of
    tables have an index: `data.source[1].weight`, `data.source[1]`. A table is on the line of its
    header, or of the first key that names it. An item of an array is on the line where it ends.
    """
    found: list[Statement] = []
    numbers: dict[str, int] = {}
    elements: dict[str, int] = {}
    table = ""
    start = 0
    lines = text.replace("\r\n", "\n").split("\n")

    def enter(path: str, tree: dict[str, Any], is_header: bool) -> str:
        """Note the line of all names in a tree below a path; return the full name of the
        last one.
        """
        last = path
        for name, value in tree.items():
            last = join(path, name)
            numbers.setdefault(last, start + 1)
            if is_header and isinstance(value, list):
                elements[last] = elements.get(last, -1) + 1
            if last in elements:
                last += f"[{elements[last]}]"
            if isinstance(value, dict):
                last = enter(last, value, is_header)
        return last

    for end in range(1, len(lines) + 1):
        if end - start > 1 and not _LAST.search(lines[end - 1]):
            continue  # else the time grows with the square of a list's length
        chunk = "\n".join(lines[start:end])
        try:
            tree = loads(chunk)
        except TOMLDecodeError:
            continue
        is_header = bool(tree) and chunk.lstrip().startswith("[")
        if is_header:
            table = enter("", tree, is_header)
            numbers[table] = start + 1
        else:
            last = enter(table, tree, is_header)
            opening = ""
            since = start
            count = 0
            for line in range(start + 1, end):  # the items of an array that ends on a later line
                with suppress(TOMLDecodeError):
                    value: Any = loads(
                        "\n".join([opening + lines[since], *lines[since + 1 : line], "]"])
                    )
                    while isinstance(value, dict):
                        value = next(iter(value.values()))
                    for _ in value:
                        numbers.setdefault(f"{last}[{count}]", line)
                        count += 1
                    opening = "items = ["
                    since = line
        found.append(Statement(chunk, start + 1, tree, table, is_header))
        start = end
    return found, numbers
