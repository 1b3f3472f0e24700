"""Records as other trainers write them: `data.record`.

    alpaca.py     instruction, input and output, by Alpaca's template
    sharegpt.py   conversations of turns with from and value
    plain.py      the template of conversations where a tokenizer brings none

The other forms need no code: `data.text_key` and the other keys of fields name what
they have.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from titanlite.config.data_sections import Data, DataSource
from titanlite.data.record_forms.alpaca import Alpaca
from titanlite.data.record_forms.sharegpt import ShareGPT
from titanlite.data.records import Columns
from titanlite.data.tokenizer import Tokenizer


class Form(Protocol):
    """How the fields of a record become a text, or a prompt and a text. It can be pickled."""

    @property
    def name(self) -> str:
        """The value of `data.record`."""
        ...

    @property
    def own(self) -> tuple[str, ...]:
        """The fields that no key names."""
        ...

    @property
    def optional(self) -> tuple[str, ...]:
        """The fields that a record need not have."""
        ...

    def strings(self, record: Mapping[str, Any], columns: Columns, where: str) -> list[Any]:
        """Return text and prompt of a record, see `records.strings_of`."""
        ...


def form_columns(
    form: str, data: Data, source: DataSource, tokenizer: Tokenizer, section: str = "data"
) -> Columns:
    """Return the fields of records of a form.

    form: a value of `data.record`. source: its keys of fields go before those of `data`. section:
    of the config, for errors.

    Raises DataError for a chat template that cannot be read.
    """

    def key(name: str, usual: str) -> str:
        return getattr(source, name) or getattr(data, name) or usual

    if form == "text":
        return Columns(key("text_key", "text"), None, section)
    if form == "completion":
        return Columns(key("completion_key", "completion"), key("prompt_key", "prompt"), section)
    if form == "alpaca":
        return Columns("output", "instruction", section, form=Alpaca())
    from titanlite.data.chat import load_template

    template = load_template(data.chat_template, tokenizer, or_plain=True, day=data.template_date)
    if form == "messages":
        return Columns(key("messages_key", "messages"), None, section, template)
    return Columns(key("messages_key", "conversations"), None, section, template, form=ShareGPT())


def form_of(name: str) -> Form:
    """Return the form of this name that has its own code."""
    return Alpaca() if name == "alpaca" else ShareGPT()


def fields_of(name: str, fields: Mapping[str, str | None]) -> dict[str, str | None]:
    """Return the keys of fields that a form stands for, and its name if it has its own code.

    fields: those that the config names; they go before the usual ones.
    """
    usual: dict[str, dict[str, str | None]] = {
        "text": {"text_key": "text"},
        "messages": {"messages_key": "messages"},
        "completion": {"prompt_key": "prompt", "completion_key": "completion"},
    }
    named = {key: value for key, value in fields.items() if value}
    return {**usual.get(name, {"record": name}), **named}
