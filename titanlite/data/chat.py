"""Conversations as `transformers` renders them: a Jinja template makes a list of messages one text.

The loss is on the assistant's turns alone. Marks around them are in the rendered text until it is
tokenized. A template with `{% generation %}` blocks sets the marks. Of another one, the messages
before a turn are rendered as the prompt of that turn, and the text behind this prompt is the turn.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from titanlite.config.urls import is_url
from titanlite.data import DataError
from titanlite.data.chat_process import TemplateError, ask
from titanlite.data.chat_worker import BEGIN, END, NO_TURN, SYNTAX, TEXT, Request
from titanlite.data.tokenizer import Tokenizer
from titanlite.data.tokenizer.files import read_url
from titanlite.utils import parse_json

_UNMARKED = str.maketrans("", "", BEGIN + END)

#: Files beside a tokenizer that may hold its template, the first that does.
TEMPLATE, _CONFIG = "chat_template.jinja", "tokenizer_config.json"


class ChatTemplate(NamedTuple):
    """`source`: Jinja. `tokens`: names and values of its variables, such as bos_token."""

    source: str
    tokens: tuple[tuple[str, str], ...] = ()

    def render(self, messages: Any, where: str) -> str:
        """Return the text of a conversation, with marks around the assistant's turns.

        where: file and record.

        Raises DataError if `messages` is no list of messages, the template refuses it, or a turn
        cannot be found.
        """
        if not (
            isinstance(messages, list)
            and all(isinstance(m, dict) and m.get("role") for m in messages)
        ):
            raise DataError(
                f"{where}: {messages!r:.80} is no list of messages, each with role and content"
            )
        if any(
            mark in json.dumps(messages, ensure_ascii=False, default=str) for mark in (BEGIN, END)
        ):
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
        return self._ask("render", messages, where)

    def prompt(self, messages: Sequence[Mapping[str, str]], where: str) -> str:
        """Return the text of a conversation up to the assistant's next turn.

        Raises DataError if it is refused.
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
                "text: the "
                "messages before it render differently without those after them; put {% "
                "generation %} and "
                "{% endgeneration %} around the assistant's content in the template"
            )
        if kind != TEXT:
            raise DataError(f"{where}: the chat template refuses it: {text}")
        return text


def _check(source: str, place: str) -> None:
    """Raise DataError, which begins with `place`, for a template that is not valid."""
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
    path: str | None, tokenizer: Tokenizer, key: str = "data.chat_template"
) -> ChatTemplate:
    """Return the template of a Jinja file; None: that of the files beside the tokenizer.

    key: what names the file, for messages. Raises DataError if there is none, or it is not valid.
    """
    folder = tokenizer.folder
    named = {number: name for name, number in tokenizer.special_tokens.items()}
    tokens = {"bos_token": named[tokenizer.bos_id], "eos_token": named[tokenizer.eos_id]}
    config: dict[str, Any] = {}
    place = f"{folder}/{_CONFIG}"
    try:
        if content := _beside(folder, _CONFIG, path):
            config = parse_json(content)
            if not isinstance(config, dict):
                raise ValueError("it holds no JSON object")
            for name, value in config.items():
                value = value.get("content") if isinstance(value, dict) else value
                if name.endswith("_token") and isinstance(value, str):
                    tokens[name] = value
        place = path or f"{folder}/{TEMPLATE}"
        content = _beside(folder, TEMPLATE) if path is None else Path(path).read_bytes()
        source: Any = None if content is None else content.decode()
        if source is None:
            place, source = f"{folder}/{_CONFIG}", config.get("chat_template")
            if isinstance(source, list):  # several, by name
                source = {one["name"]: one["template"] for one in source}.get("default")
    except (OSError, ValueError) as error:
        raise DataError(f"{key}: {place} cannot be read: {error}") from None
    if not isinstance(source, str):
        raise DataError(
            f"{key}: the tokenizer brings no chat template ({TEMPLATE}, or chat_template in "
            f"{_CONFIG}, "
            f"in {folder or 'the folder of model.tokenizer_path'}); name a Jinja file"
        )
    _check(source, f"{key}: {place}")
    return ChatTemplate(source, tuple(tokens.items()))


def _beside(folder: str | None, name: str, template: str | None = None) -> bytes | None:
    """Return the content of a file beside a tokenizer, None if there is none.

    folder: a path or URL.

    template: the file that is named instead. Then a server is asked for nothing more.
    """
    if folder is None or is_url(folder) and template is not None:
        return None
    with suppress(FileNotFoundError):
        content = (
            read_url(f"{folder}/{name}") if is_url(folder) else Path(folder, name).read_bytes()
        )
        # Some servers answer with a page where there is no file.
        return (
            None if content.lstrip()[:9].lower().startswith((b"<!doctype", b"<html")) else content
        )
    return None


def encode_chat(text: str, tokenizer: Tokenizer) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Return the ids of a rendered conversation, as it is, and whether each is of the assistant:
    [tokens] each.

    Names of special tokens become their ids. A token that crosses the border of a turn is of the
    assistant.
    """
    ids, mask, inside = list[int](), list[bool](), False
    for part in _special(tokenizer).split(text):
        if (special := tokenizer.special_tokens.get(part)) is not None:
            ids.append(special)
            mask.append(inside)
            continue
        plain = part.translate(_UNMARKED)
        found = tokenizer.encode(plain) if plain else []
        at = before = 0  # characters and tokens of the part that are done
        for piece in re.split(f"([{BEGIN}{END}])", part):
            if piece not in (BEGIN, END):
                at += len(piece)
                continue
            place = (
                len(found)
                if at == len(plain)
                else _tokens_before(plain[:at], found, tokenizer, inside)
            )
            place = max(place, before)  # a token that crosses two borders at one place
            mask += [inside] * (place - before)
            before, inside = place, piece == BEGIN
        mask += [inside] * (len(found) - before)
        ids += found
    return np.array(ids, dtype=np.int64), np.array(mask, dtype=bool)


def _tokens_before(text: str, ids: list[int], tokenizer: Tokenizer, crossing: bool) -> int:
    """Return how many of `ids` are of `text`, with which their text begins.

    crossing: count one that reaches over.
    """
    alone = tokenizer.encode(text) if text else []
    same = next(
        (n for n, (a, b) in enumerate(zip(alone, ids, strict=False)) if a != b),
        min(len(alone), len(ids)),
    )
    return same + (crossing and same < len(alone))


@lru_cache(maxsize=4)
def _special(tokenizer: Tokenizer) -> re.Pattern[str]:
    """Return the pattern of the special tokens' names, as a group."""
    names = sorted(tokenizer.special_tokens, key=len, reverse=True)
    return re.compile("(" + "|".join(map(re.escape, names)) + ")")
