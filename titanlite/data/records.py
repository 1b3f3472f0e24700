"""A document as it is in a file: its text, its place, and the fields that hold it."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from titanlite.data import DataError

if TYPE_CHECKING:
    from titanlite.data.chat import ChatTemplate

#: Characters of a field that an error shows.
_SHOWN = 160


class Record(NamedTuple):
    """One document, and its number from 1 among a file's rows or a function's documents."""

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
    #: Section of the config, for the keys in errors.
    section: str = "data"
    #: `text` holds messages, which it renders.
    chat: ChatTemplate | None = None

    @property
    def wanted(self) -> tuple[str, ...]:
        return (self.text,) if self.prompt is None else (self.text, self.prompt)

    @property
    def decisive(self) -> list[Any]:
        """Settings that decide the text of a record, besides the wanted fields."""
        return [*(self.chat or ())]

    @property
    def has_masks(self) -> bool:
        return self.prompt is not None or self.chat is not None

    def remedy(self, column: str) -> str:
        key = "text_key" if self.prompt is None else "completion_key"
        if self.chat:
            key = "messages_key"
        elif column == self.prompt:
            key = "prompt_key"
        return f"name the field by {self.section}.{key}"

    def check(self, names: Collection[str], where: str) -> None:
        """Raise DataError unless `names` of columns include all that are read."""
        for column in self.wanted:
            if column not in names:
                raise DataError(
                    f"{where}: no column {column!r} ({', '.join(names)}); {self.remedy(column)}"
                )
            if list(names).count(column) > 1:
                raise DataError(f"{where} names two columns {column!r}; rename one")


def strings_of(record: object, columns: Columns, where: str) -> list[Any]:
    """Return text and perhaps prompt of a record.

    Raises DataError that begins with `where` for no string.
    """
    if not isinstance(record, Mapping):
        raise DataError(
            f"{where}: expected a text, or a table with the key {columns.text!r}, found "
            f"{type(record).__name__}; of an array `jq -c '.[]'` writes a record per line"
        )
    if columns.chat is not None and columns.text in record:
        messages = record[columns.text]
        if not are_turns(messages, ("role",)):
            raise DataError(
                f"{where}: the key {columns.text!r} is no list of messages, each with role and "
                f"content: {cut(messages)}; {columns.remedy(columns.text)}"
            )
        return [columns.chat.render(messages, where), None]
    strings: list[Any] = []
    for column in columns.wanted:
        value = record.get(column)
        if isinstance(value, str):
            strings.append(value)
            continue
        if column in record:
            problem = f"must be a string, found {type(value).__name__}: {cut(value)}"
        else:
            problem = f"is missing (keys: {', '.join(map(repr, record)) or 'none'})"
        raise DataError(f"{where}: the key {column!r} {problem}; {columns.remedy(column)}")
    return strings


def are_turns(value: object, keys: Collection[str]) -> bool:
    """Return whether a value is a list of tables with these keys."""
    if not isinstance(value, list):
        return False
    return all(isinstance(one, dict) and all(map(one.get, keys)) for one in value)


def cut(value: object) -> str:
    """Return a value as JSON, a long one with an ellipsis."""
    if isinstance(value, bytes):
        value = value.decode(errors="replace")
    text = json.dumps(value, ensure_ascii=False, default=str)
    text = text.encode(errors="replace").decode()
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"
