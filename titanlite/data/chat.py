"""Conversations as `transformers` renders them: a Jinja template makes a list of messages one text.

The loss is on the assistant's turns alone. Marks around them are in the rendered text until it is
tokenized. A template with `{% generation %}` blocks sets the marks. Of another one, the messages
before a turn are rendered as the prompt of that turn, and the text behind this prompt is the turn.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import numpy as np
from numpy.typing import NDArray

from titanlite.data import DataError
from titanlite.data.records import are_turns, cut
from titanlite.data.tokenizer import Tokenizer
from titanlite.data.tokenizer.base import whole_characters
from titanlite.utils import parse_json

#: Before and after a turn of the assistant. Unicode keeps these two free of characters.
BEGIN = "\ufdd0"
END = "\ufdd1"
_UNMARKED = str.maketrans("", "", BEGIN + END)
#: Name of the variable with the day that `strftime_now` of a template has.
DAY = "template_date"

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
        messages = _without_nulls(messages)
        whole = self._text(messages, where)
        if BEGIN in whole:
            return whole
        parts: list[str] = []
        done = 0
        for number, role in enumerate(roles):
            if role != "assistant":
                continue
            prompt = self._text(messages[:number], where, prompt=True)
            turn = self._text(messages[: number + 1], where)
            is_found = whole.startswith(turn) and turn.startswith(prompt) and len(prompt) >= done
            if not is_found:
                raise DataError(
                    f"{where}: message {number + 1}, of the assistant, cannot be found in the "
                    "rendered text: the messages before it render differently without those after "
                    "them. Put {% generation %} and {% endgeneration %} around the assistant's "
                    "content in the template"
                )
            parts += [whole[done : len(prompt)], BEGIN, whole[len(prompt) : len(turn)], END]
            done = len(turn)
        return "".join(parts) + whole[done:]

    def prompt(self, messages: Sequence[Mapping[str, str]], where: str) -> str:
        """Return the text up to the assistant's next turn. Raises DataError if the template refuses
        it.
        """
        return self._text(messages, where, prompt=True).translate(_UNMARKED)

    def _text(self, messages: Sequence[Any], where: str, prompt: bool = False) -> str:
        variables: dict[str, Any] = {"tools": None, "documents": None, **dict(self.tokens)}
        if DAY in variables:
            variables["strftime_now"] = datetime.fromisoformat(variables[DAY]).strftime
        try:
            found: str = _compiled(self.source).render(
                messages=messages, add_generation_prompt=prompt, **variables
            )
        except Exception as error:  # a template raises what its filters and tests raise
            hint = ""
            if "'strftime_now' is undefined" in str(error):
                hint = '; it writes the date: set data.template_date, as "2025-01-31"'
            raise DataError(
                f"{where}: the chat template refuses it: {type(error).__name__}: {error}{hint}"
            ) from error
        return found


@lru_cache(maxsize=8)
def _compiled(source: str) -> Any:
    """Compile as `transformers` does, without the date of today."""
    import jinja2
    from jinja2 import nodes
    from jinja2.exceptions import TemplateError
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        tags = {"generation"}  # noqa: RUF012 (Jinja's interface)

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(["name:endgeneration"], drop_needle=True)
            return nodes.CallBlock(self.call_method("_marked"), [], [], body).set_lineno(line)

        def _marked(self, caller: Any) -> str:
            return f"{BEGIN}{caller()}{END}"

    def refuse(message: str) -> NoReturn:
        raise TemplateError(message)

    # No other option of `json.dumps`: `cls` calls what a template names, past the sandbox.
    def to_json(
        value: Any,
        ensure_ascii: bool = False,
        indent: int | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        return json.dumps(
            value,
            ensure_ascii=ensure_ascii,
            indent=indent,
            separators=separators,
            sort_keys=sort_keys,
        )

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    environment.filters["tojson"] = to_json
    # Messages have no keys with null, which some templates ask for: DeepSeek's for the content.
    environment.tests["none"] = lambda value: value is None or jinja2.is_undefined(value)
    environment.globals["raise_exception"] = refuse
    return environment.from_string(source)


def _without_nulls(value: Any) -> Any:
    """Drop keys whose value is null: a table has every key for all messages."""
    if isinstance(value, dict):
        return {key: _without_nulls(one) for key, one in value.items() if one is not None}
    return list(map(_without_nulls, value)) if isinstance(value, list) else value


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
    place, source, config = _read_source(folder, path, key)
    if isinstance(source, list):
        # Several, by name.
        source = {one["name"]: one["template"] for one in source}.get("default")
    if not isinstance(source, str):
        raise DataError(
            f"{key}: the tokenizer brings no chat template ({TEMPLATE}, or chat_template in "
            f"{_CONFIG}, in {folder or 'the folder of model.tokenizer_path'}); name a Jinja file, "
            f'or "{_PLAIN}", as data.chat_template of the run'
        )
    try:
        _compiled(source)
    except Exception as error:  # not of syntax alone: a template may be nested too deeply
        line = getattr(error, "lineno", None)
        at = f", line {line}" if line else ""
        raise DataError(f"{key}: {place}{at}: {getattr(error, 'message', error)}") from None
    name_of = {number: name for name, number in tokenizer.special_tokens.items()}
    variables = {"bos_token": name_of[tokenizer.bos_id], "eos_token": name_of[tokenizer.eos_id]}
    for name, value in config.items():
        if isinstance(value, dict):
            value = value.get("content")
        if name.endswith("_token") and isinstance(value, str):
            variables[name] = value
    if day:
        try:
            variables[DAY] = str(datetime.fromisoformat(day).date())
        except ValueError as error:
            raise DataError(f"data.template_date: {day!r} is no day: {error}") from None
    return ChatTemplate(source, tuple(variables.items()))


def _read_source(folder: str | None, path: str | None, key: str) -> tuple[str, Any, dict[str, Any]]:
    """Return where a template is, its source, and the tokenizer's config."""
    place = f"{folder}/{_CONFIG}"
    try:
        content = _beside(folder, _CONFIG)
        config = parse_json(content) if content else {}
        if not isinstance(config, dict):
            raise ValueError("it holds no JSON object")
        source = config.get("chat_template")
        content = _beside(folder, TEMPLATE)
        if path == _PLAIN:
            place, source = _PLAIN, PLAIN_TEMPLATE
        elif path or content is not None:
            place = path or f"{folder}/{TEMPLATE}"
            source = Path(place).read_bytes().decode()
    except (OSError, ValueError) as error:
        raise DataError(f"{key}: {place} cannot be read: {error}") from None
    return place, source, config


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
