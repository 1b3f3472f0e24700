"""Conversations as `transformers` renders them: a Jinja template makes a list of messages one text.

The loss is on the assistant's turns alone. Marks around them are in the rendered text until it is
tokenized. A template with `{% generation %}` blocks sets the marks. Of another one, the messages
before a turn are rendered as the prompt of that turn, and the text behind this prompt is the turn.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from datetime import date
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from titanlite.data import DataError
from titanlite.data.chat_process import TemplateError, ask
from titanlite.data.chat_worker import BEGIN, DAY, END, NO_TURN, SYNTAX, TEXT, Request
from titanlite.data.records import are_turns, cut
from titanlite.data.tokenizer import Tokenizer
from titanlite.data.tokenizer.base import whole_characters
from titanlite.utils import parse_json

_UNMARKED = str.maketrans("", "", BEGIN + END)

#: Files beside a tokenizer that may hold its template, the first that does.
TEMPLATE = "chat_template.jinja"
_CONFIG = "tokenizer_config.json"
#: Names the template of a tokenizer that brings none: lines "User: …" and "Assistant: …" with EOS.
#: The loss is on the space before an answer, on the answer, and on EOS.
_PLAIN = "plain"
PLAIN_TEMPLATE = (
    "{{ bos_token }}"
    "{% for message in messages %}"
    "{% if not loop.first %}{{ '\\n' }}{% endif %}"
    "{% if message.role == 'assistant' %}"
    "Assistant:{% generation %}{{ ' ' + message.content + eos_token }}{% endgeneration %}"
    "{% else %}"
    "{{ (message.role | capitalize) + ': ' + message.content }}"
    "{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}"
    "{% if messages %}{{ '\\n' }}{% endif %}Assistant:"
    "{% endif %}"
)


class ChatTemplate(NamedTuple):
    """A Jinja `source`, and the `tokens` that it uses by name, such as bos_token."""

    source: str
    tokens: tuple[tuple[str, str], ...] = ()

    def render(self, messages: Any, where: str) -> str:
        """Return the text of a conversation, with marks around the assistant's turns.

        Raises DataError for bad messages, a template's refusal, or a turn that is not found.
        """
        if not are_turns(messages, ("role",)):
            raise DataError(
                f"{where}: this is no list of messages, each with role and content: {cut(messages)}"
            )
        content = json.dumps(messages, ensure_ascii=False, default=str)
        if BEGIN in content or END in content:
            raise DataError(
                f"{where}: a message holds U+FDD0 or U+FDD1, which stand for no character; remove "
                "them"
            )
        roles = [message["role"] for message in messages]
        if "assistant" not in roles:
            found = ", ".join(dict.fromkeys(map(str, roles))) or "none"
            raise DataError(
                f"{where}: no message has the role assistant (roles: {found}), so the loss counts "
                "nothing"
            )
        unweighted = [one for one in messages if one.get("weight", 1) not in (1, None)]
        if unweighted:
            raise DataError(
                f"{where}: the loss counts each turn of the assistant, and a message has another "
                f"weight than 1: {cut(unweighted[0])}; leave it out"
            )
        return self._ask("render", _without_nulls(messages), where)

    def prompt(self, messages: Sequence[Mapping[str, str]], where: str) -> str:
        """Return the text up to the assistant's next turn. Raises DataError if the template refuses
        it.
        """
        return self._ask("prompt", messages, where).translate(_UNMARKED)

    def _ask(self, action: str, messages: Sequence[Mapping[str, Any]], where: str) -> str:
        try:
            kind, text = ask(Request(action, self.source, dict(self.tokens), messages))
        except TemplateError as error:
            raise DataError(
                f"{where}: the chat template cannot be rendered: {error}; mend the template"
            ) from None
        if kind == NO_TURN:
            raise DataError(
                f"{where}: message {text}, of the assistant, cannot be found in the rendered "
                "text: the messages before it render differently without those after them. Put "
                "{% generation %} and {% endgeneration %} around the assistant's content in the "
                "template"
            )
        if kind != TEXT:
            hint = ""
            if "'strftime_now' is undefined" in text:
                hint = '; it writes the date: set data.template_date, as "2025-01-31"'
            raise DataError(f"{where}: the chat template refuses it: {text}{hint}")
        return text


def _without_nulls(value: Any) -> Any:
    """Drop keys whose value is null: a table has every key for all messages."""
    if isinstance(value, dict):
        return {key: _without_nulls(one) for key, one in value.items() if one is not None}
    return list(map(_without_nulls, value)) if isinstance(value, list) else value


def _check(source: str, place: str) -> None:
    try:
        kind, text = ask(Request("check", source, {}))
    except TemplateError as error:
        raise DataError(
            f"{place}: the chat template cannot be read: {error}; mend the template"
        ) from None
    if kind == SYNTAX:
        line, _, message = text.partition("\n")
        raise DataError(f"{place}, line {line}: {message}")
    if kind != TEXT:
        raise DataError(f"{place}: the chat template cannot be read: {text}")


def load_template(
    path: str | None,
    tokenizer: Tokenizer,
    key: str = "data.chat_template",
    *,
    day: str | None = None,
) -> ChatTemplate:
    """Return the template of a Jinja file; None takes the one beside the tokenizer.

    "plain" is `PLAIN_TEMPLATE`; `day` is `data.template_date`. Raises DataError without a valid
    template.
    """
    folder = tokenizer.folder
    config = _config_beside(folder, key)
    variables = _variables(tokenizer, config)
    if day:
        try:
            variables[DAY] = str(date.fromisoformat(day))
        except ValueError as error:
            raise DataError(f"data.template_date: {day!r} is no day: {error}") from None
    place, source = _find_source(folder, path, config, key)
    if not isinstance(source, str):
        raise DataError(
            f"{key}: the tokenizer brings no chat template ({TEMPLATE}, or chat_template in "
            f"{_CONFIG}, in {folder or 'the folder of model.tokenizer_path'}); name a Jinja file, "
            f'or "{_PLAIN}"'
        )
    _check(source, f"{key}: {place}")
    return ChatTemplate(source, tuple(variables.items()))


def _config_beside(folder: str | None, key: str) -> dict[str, Any]:
    try:
        content = _beside(folder, _CONFIG)
        config = parse_json(content) if content else {}
        if not isinstance(config, dict):
            raise ValueError("it holds no JSON object")
    except (OSError, ValueError) as error:
        raise DataError(f"{key}: {folder}/{_CONFIG} cannot be read: {error}") from None
    return config


def _find_source(
    folder: str | None, path: str | None, config: Mapping[str, Any], key: str
) -> tuple[str, Any]:
    if path == _PLAIN:
        return _PLAIN, PLAIN_TEMPLATE
    place = path or f"{folder}/{TEMPLATE}"
    try:
        content = _beside(folder, TEMPLATE) if path is None else Path(path).read_bytes()
        if content is not None:
            return place, content.decode()
    except (OSError, ValueError) as error:
        raise DataError(f"{key}: {place} cannot be read: {error}") from None
    source = config.get("chat_template")
    if isinstance(source, list):
        # Several, by name.
        source = {one["name"]: one["template"] for one in source}.get("default")
    return f"{folder}/{_CONFIG}", source


def _variables(tokenizer: Tokenizer, config: Mapping[str, Any]) -> dict[str, str]:
    name_of = {number: name for name, number in tokenizer.special_tokens.items()}
    tokens = {"bos_token": name_of[tokenizer.bos_id], "eos_token": name_of[tokenizer.eos_id]}
    for name, value in config.items():
        if isinstance(value, dict):
            value = value.get("content")
        if name.endswith("_token") and isinstance(value, str):
            tokens[name] = value
    return tokens


def _beside(folder: str | None, name: str) -> bytes | None:
    if folder is None:
        return None
    try:
        return Path(folder, name).read_bytes()
    except FileNotFoundError:
        return None


def encode_chat(text: str, tokenizer: Tokenizer) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Return the ids of a rendered conversation, and whether each is the assistant's: [tokens]
    each.

    Names of special tokens become their ids. A token across a turn's border is the assistant's.
    """
    # Every second piece is a turn of the assistant.
    pieces = re.split(f"[{BEGIN}{END}]", whole_characters(text))
    ids, spans = tokenizer.encode_rendered("".join(pieces))
    lengths = [0, *map(len, pieces)]
    inside = np.repeat(np.arange(-1, len(pieces)) % 2 == 1, lengths)
    before = np.concatenate([[0], np.cumsum(inside)])
    begins, ends = spans[:, 0], spans[:, 1]
    # A byte of a character may have no length of its own.
    ends = np.maximum(ends, begins + 1).clip(max=len(inside))
    return np.array(ids, dtype=np.int64), before[ends] > before[begins]
