"""A document as it is in a file: its text, its place, and the fields that hold it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from titanlite.data import DataError
from titanlite.data.surrogates import refuse_surrogates

if TYPE_CHECKING:
    from titanlite.data.chat import ChatTemplate


class Record(NamedTuple):
    """One document and its place: `number` counts a file's lines or rows, or a function's
    documents, from 1.
    """

    #: The file or its URL; of a function its dotted path.
    file: Path | str
    number: int
    text: str
    #: Comes before the text; the model reads it and is not trained on it. None: the text is a
    #: rendered conversation, see `titanlite.data.chat`.
    prompt: str | None = ""


class Columns(NamedTuple):
    """The fields of a record that are read."""

    text: str = "text"
    #: Comes before the text; None: there are no prompts.
    prompt: str | None = None
    #: Of the config, for the keys in errors.
    section: str = "data"
    #: `text` holds messages, which it renders.
    chat: ChatTemplate | None = None

    @property
    def wanted(self) -> tuple[str, ...]:
        return (self.text,) if self.prompt is None else (self.text, self.prompt)

    @property
    def has_masks(self) -> bool:
        """Whether not every token is a target."""
        return self.prompt is not None or self.chat is not None

    def remedy(self, column: str) -> str:
        """Return what to do where a record has no such field."""
        return f"name the field by {self.section}.{self._key_of(column)}"

    def _key_of(self, column: str) -> str:
        if self.chat:
            return "messages_key"
        if column == self.prompt:
            return "prompt_key"
        return "text_key" if self.prompt is None else "completion_key"


def strings_of(record: object, columns: Columns, where: str) -> list[Any]:
    """Return text and perhaps prompt of a record.

    Raises DataError that begins with `where` if one is no string, or holds a lone surrogate.
    """
    if not isinstance(record, Mapping):
        raise DataError(
            f"{where}: expected a text, or a table with the key {columns.text!r}, found "
            f"{type(record).__name__}"
        )
    if columns.chat is not None and columns.text in record:
        refuse_surrogates(record[columns.text], columns.text, where)
        return [columns.chat.render(record[columns.text], where), None]
    for column in columns.wanted:
        value = record.get(column)
        if isinstance(value, str):
            refuse_surrogates(value, column, where)
            continue
        if column in record:
            problem = f"must be a string, found {type(value).__name__}"
        else:
            problem = f"is missing (keys: {', '.join(map(repr, record)) or 'none'})"
        raise DataError(f"{where}: the key {column!r} {problem}; {columns.remedy(column)}")
    return [record[column] for column in columns.wanted]
