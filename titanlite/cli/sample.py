"""`titanlite sample`: continue prompts with the weights of a checkpoint.

No torch until the prompts are read.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from titanlite import exit_codes
from titanlite.checkpoint.paths import to_path
from titanlite.cli import at_least
from titanlite.cli.checkpoint_folders import check_weights
from titanlite.cli.loading import LoadedModel, add_arguments, load_model
from titanlite.cli.parser import Commands, Parser, new_command
from titanlite.cli.run_figures import to_json
from titanlite.config.errors import bad_flag
from titanlite.utils import Style, counted, escape, say

if TYPE_CHECKING:
    from titanlite.models.generate import Sampling, TextStream


def add_command(commands: Commands) -> None:
    """Add `sample` to argparse."""
    parser = new_command(
        commands,
        _run,
        "sample",
        "continue text with a checkpoint",
        "Continue each TEXT with the weights of a checkpoint, token by token, on one "
        "device. Without TEXT the prompt is read from standard input. The text goes "
        "to standard output, figures go to standard error.",
    )
    add_arguments(parser)
    _add_prompts(parser)
    _add_sampling(parser)


def _add_prompts(parser: Parser) -> None:
    add = parser.add
    add("prompts", "a prompt; - is standard input", "TEXT", nargs="*")
    add("--prompt-file", "a prompt on each line, after those of the command line", "FILE")
    add("--chat", "each prompt is a user's message, rendered by the chat template")
    add("--chat-template", "Jinja file for --chat (default: the run's, or the tokenizer's)", "FILE")


def _add_sampling(parser: Parser) -> None:
    add = parser.add
    add("--max-tokens", "most tokens to write (default: 256)", "N", type=at_least(1), default=256)
    add("--temperature", "0 is --greedy (default: 1)", "T", type=_number(0, math.inf), default=1.0)
    add("--greedy", "always take the most probable token")
    top_k = "draw from the K most probable tokens (0: all)"
    add("--top-k", top_k, "K", type=at_least(0), default=0)
    top_p = "draw from the fewest that sum to P (1: all)"
    add("--top-p", top_p, "P", type=_number(1e-6, 1), default=1.0)
    seed = "the same seed gives the same text (default: 0)"
    add("--seed", seed, "N", type=at_least(0), default=0)
    add("--batch-size", "prompts continued at once (default: 8)", "N", type=at_least(1), default=8)
    add("--json", "print a JSON object at the end instead of the text as it comes")


def _number(low: float, high: float) -> Callable[[str], float]:
    def number(text: str) -> float:
        value = float(text)
        if not low <= value <= high:
            raise argparse.ArgumentTypeError(f"expected {low:g} to {high:g}, got {text}")
        return value

    return number


@dataclass
class Row:
    """A prompt and its continuation."""

    prompt: str
    #: The text that the model sees: the prompt, or the conversation that a template made of it.
    ids: list[int]
    stream: TextStream
    text: str = ""
    new: list[int] = field(default_factory=list)
    #: stop: the model ended its text; length: --max-tokens; context: the longest sequence of the
    #: model.
    finish: str = ""


def _run(arguments: argparse.Namespace) -> tuple[str, int]:
    check_weights(to_path(arguments.checkpoint))
    prompts = read_prompts(arguments.prompts, arguments.prompt_file)
    loaded = load_model(arguments)
    from titanlite.models.generate import Sampling

    say(loaded.summary)
    rows = make_rows(loaded, prompts, arguments.chat, arguments.chat_template)
    temperature = 0.0 if arguments.greedy else arguments.temperature
    sampling = Sampling(temperature, arguments.top_k, arguments.top_p, arguments.seed)
    started = time.perf_counter()
    show = None
    try:
        show = None if arguments.json else _Printer(rows, arguments.style, arguments.chat)
        first_seconds = sample(
            loaded, rows, sampling, arguments.max_tokens, arguments.batch_size, show
        )
    except KeyboardInterrupt:
        return "\n" if show else "", exit_codes.INTERRUPTED
    # `head` has seen enough. Python would complain again while it shuts down.
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return "", exit_codes.DONE
    seconds = time.perf_counter() - started
    tokens = sum(len(row.new) for row in rows)
    speed = tokens / seconds
    if arguments.json:
        found = [
            {
                "prompt": row.prompt,
                "text": row.text,
                "ids": row.new,
                "prompt_tokens": len(row.ids),
                "finish": row.finish,
            }
            for row in rows
        ]
        about = {
            "checkpoint": loaded.path,
            "step": loaded.step,
            **sampling._asdict(),
            "tokens_per_second": speed,
        }
        return to_json({**about, "samples": found}), exit_codes.DONE
    if cut := [str(number) for number, row in enumerate(rows, 1) if row.finish == "context"]:
        which = f"prompt {', '.join(cut)}" if len(rows) > 1 else "the text"
        say(f"{which} reached the context of {loaded.limit:,} tokens; --context N lengthens it")
    say(f"{counted(tokens, 'tokens')}, {speed:,.1f} tokens/s; first in {first_seconds:.2f} s")
    return "", exit_codes.DONE


def read_prompts(given: Sequence[str], file: str | None) -> list[str]:
    """Return the prompts of a command line.

    Raises ConfigError if there is none, or the file cannot be read.
    """

    if not given and file is None:
        if sys.stdin.isatty():
            raise bad_flag(
                "TEXT", "no prompt: give a text, --prompt-file FILE, or a text on standard input"
            )
        given = ["-"]
    found = [sys.stdin.read().removesuffix("\n") if prompt == "-" else prompt for prompt in given]
    if file is not None:
        try:
            found += [line for line in Path(file).read_text("utf-8").splitlines() if line.strip()]
        except (OSError, ValueError) as error:
            raise bad_flag("--prompt-file", f"{file} cannot be read: {error}") from None
    if not found:
        raise bad_flag("--prompt-file", f"{file} holds no prompt")
    return found


def make_rows(
    loaded: LoadedModel, prompts: Sequence[str], chat: bool, template: str | None
) -> list[Row]:
    """Return the prompts with their ids: BOS and the text, or with `chat` the conversation.

    Raises DataError for a prompt that does not fit into the context, or that the chat template
    refuses.
    """
    from titanlite.data import DataError
    from titanlite.data.chat import encode_chat, load_template
    from titanlite.models.generate import TextStream

    tokenizer = loaded.tokenizer
    rows = list[Row]()
    jinja = (
        load_template(
            template or loaded.chat_template,
            tokenizer,
            "--chat-template",
            day=loaded.template_date,
        )
        if chat
        else None
    )
    for number, prompt in enumerate(prompts, 1):
        if jinja is None:
            ids = tokenizer.encode(prompt, bos=True)
        else:
            text = jinja.prompt([{"role": "user", "content": prompt}], f"prompt {number}")
            ids = encode_chat(text, tokenizer)[0].tolist()
        if not 0 < len(ids) < loaded.limit:
            raise DataError(
                f"prompt {number} has {len(ids):,} tokens, and the model's context is "
                f"{loaded.limit:,}: shorten it, or lengthen the context with --context N"
            )
        rows.append(Row(prompt, ids, TextStream(tokenizer, ids)))
    return rows


def sample(
    loaded: LoadedModel,
    rows: Sequence[Row],
    sampling: Sampling,
    max_tokens: int,
    batch: int,
    show: _Printer | None,
) -> float:
    """Continue the rows in place, `batch` at once. Return the seconds until the first token."""
    from titanlite.models.generate import generate

    started = time.perf_counter()
    first = 0.0
    for begin in range(0, len(rows), batch):
        some = rows[begin : begin + batch]
        steps = generate(
            loaded.model,
            [row.ids for row in some],
            max_tokens=max_tokens,
            limit=loaded.limit,
            sampling=sampling,
            first_row=begin,
            stop_ids=loaded.stop_ids,
            head=loaded.head,
            vocab=loaded.tokenizer.vocab_size,
        )
        for ids in steps:
            first = first or time.perf_counter() - started
            for row, new in zip(some, ids, strict=True):
                if new is None:
                    continue
                row.new.append(new)
                if new in loaded.stop_ids:
                    row.finish = "stop"
                elif len(row.ids) + len(row.new) >= loaded.limit:
                    row.finish = "context"
                elif len(row.new) >= max_tokens:
                    row.finish = "length"
                row.text += row.stream.add(
                    [] if row.finish == "stop" else [new], whole=bool(row.finish)
                )
            if show is not None:
                show()
    return first


class _Printer:
    """Prints the rows one after the other, each as it comes; the others wait."""

    def __init__(self, rows: Sequence[Row], style: Style, chat: bool) -> None:
        self._rows = rows
        self._style = style
        self._chat = chat
        self._at = self._shown = 0
        self._begin()

    def __call__(self) -> None:
        while self._at < len(self._rows):
            row = self._rows[self._at]
            self._print(row.text[self._shown :])
            self._shown = len(row.text)
            if not row.finish:
                return
            self._print("\n")
            self._at += 1
            self._shown = 0
            self._begin()

    def _begin(self) -> None:
        if self._at < len(self._rows):
            if self._at:
                self._print("\n")
            row = self._rows[self._at]
            lead = row.prompt
            if self._chat:
                lead = f"> {row.prompt}\n" if len(self._rows) > 1 else ""
            if sys.stdout.isatty():
                lead = escape(lead)
            print(self._style.dim(lead), end="", flush=True)

    @staticmethod
    def _print(text: str) -> None:
        # A terminal obeys no control characters that a model writes.
        print(escape(text, verbatim=True) if sys.stdout.isatty() else text, end="", flush=True)
