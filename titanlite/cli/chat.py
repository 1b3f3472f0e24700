"""A dialogue with a model: `titanlite sample CHECKPOINT --chat` without TEXT."""

from __future__ import annotations

import sys
from contextlib import suppress
from typing import TYPE_CHECKING

from titanlite.cli.loading import LoadedModel
from titanlite.data import DataError
from titanlite.utils import counted, escape, say

if TYPE_CHECKING:
    from titanlite.models.generate import Sampling

Messages = list[dict[str, str]]


def hold_dialogue(loaded: LoadedModel, max_tokens: int, sampling: Sampling) -> None:
    """Answer each line of standard input, with what was said before as context.

    Raises DataError for a model without a chat template.
    """
    loaded.encode_chat([{"role": "user", "content": "?"}], "the dialogue")
    mark = ""
    if sys.stdin.isatty():
        # A file gets the answers alone.
        mark = "> " if sys.stdout.isatty() else ""
        with suppress(ImportError):
            import readline  # noqa: F401  # keys that move the cursor
        say("Ctrl-D ends the dialogue, Ctrl-C an answer.")
    messages: Messages = []
    turn = 0
    while True:
        try:
            line = input(mark)
        except (EOFError, KeyboardInterrupt) as end:
            print(end="\n" if mark else "", flush=True)
            if isinstance(end, EOFError):
                return
            continue
        if not line.strip():
            continue
        messages.append({"role": "user", "content": line})
        try:
            prompt = _encode_newest(loaded, messages, max_tokens)
        except DataError as error:
            say(f"error: {error}")
            messages.pop()
            continue
        text = _answer(loaded, prompt, max_tokens, sampling, turn)
        messages.append({"role": "assistant", "content": text.strip()})
        turn += 1


def _encode_newest(loaded: LoadedModel, messages: Messages, max_tokens: int) -> list[int]:
    """Return the ids of the dialogue; drop the oldest turns that leave no room to answer.

    Raises DataError for a last message over the context.
    """
    room = min(max_tokens, loaded.limit // 2)
    for first in range(0, len(messages), 2):
        ids = loaded.encode_chat(messages[first:], "the dialogue")
        if len(ids) + room <= loaded.limit:
            break
    if len(ids) >= loaded.limit:
        raise DataError(
            f"this message has {len(ids):,} tokens, and the model's context is {loaded.limit:,}: "
            "shorten it"
        )
    if first:
        say(f"the context no longer holds the oldest {counted(first // 2, 'turns')}")
        del messages[:first]
    return ids


def _answer(
    loaded: LoadedModel, prompt: list[int], max_tokens: int, sampling: Sampling, turn: int
) -> str:
    """Print an answer as its tokens come; return it."""
    text = shown = ""
    is_cut = False
    try:
        for ids, text in loaded.write(prompt, max_tokens, sampling, turn):
            is_cut = ids[-1] not in loaded.stop_ids
            # A character may have several tokens.
            if not text.endswith("\ufffd"):
                _print(text[len(shown) :])
                shown = text
    except KeyboardInterrupt:
        is_cut = False
    _print(text[len(shown) :] + "\n")
    if is_cut:
        say(f"the answer was cut: --max-tokens {max_tokens}, or the end of the context")
    return text


def _print(text: str) -> None:
    # A terminal obeys no control characters that a model writes.
    text = escape(text, verbatim=True) if sys.stdout.isatty() else text
    print(text, end="", flush=True)
