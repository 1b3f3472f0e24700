"""Halves of surrogate pairs in text: JSON can spell them, and no tokenizer can encode them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from titanlite.data import DataError


def refuse_surrogates(value: Any, field: str, where: str) -> None:
    r"""Raise DataError for a text that holds a lone surrogate, such as JSON's "\ud83d" alone.

    A tokenizer would put U+FFFD in its place. value: a string, or lists and tables that hold some.
    field: its name. where: file and line.
    """
    for path, text in _strings(value, field):
        try:
            text.encode()
        except UnicodeEncodeError as error:
            code = ord(text[error.start])
            raise DataError(
                f"{where}: the field {path} holds \\u{code:04x} at character {error.start + 1}, "
                "half of a surrogate pair, which is no character; write the whole pair, or leave "
                "it out"
            ) from None


def _strings(value: Any, path: str) -> Iterator[tuple[str, str]]:
    """Iterate over the strings of a value, each with its path, as messages[0].content."""
    # No function that calls itself: JSON may be nested deeply.
    left = [(path, value)]
    while left:
        where, one = left.pop()
        if isinstance(one, str):
            yield where, one
        elif isinstance(one, list):
            left += [(f"{where}[{number}]", inner) for number, inner in enumerate(one)]
        elif isinstance(one, dict):
            left += [(f"{where}.{name}", inner) for name, inner in one.items()]
