"""`titanlite sample`: continue prompts with the weights of a checkpoint.

No torch until the prompts are read.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from titanlite.checkpoint.store_paths import to_path
from titanlite.cli import at_least
from titanlite.cli.argument_parser import Commands, new_command
from titanlite.cli.checkpoint_folders import check_weights
from titanlite.cli.loading import LoadedModel, add_arguments, load_model
from titanlite.cli.run_figures import to_json
from titanlite.utils import counted, escape, say

if TYPE_CHECKING:
    from titanlite.models.generate import Sampling

#: Prompts that are continued at once.
_BATCH = 8


def add_command(commands: Commands) -> None:
    """Add `sample` to argparse."""
    parser = new_command(
        commands,
        _run,
        "sample",
        "continue text with a checkpoint",
        "Continue each TEXT with the weights of a checkpoint, on one device. Without TEXT the "
        "prompt is read from standard input. The text goes to standard output, figures go to "
        "standard error.",
    )
    add_arguments(parser)
    add = parser.add
    add("prompts", "a prompt (default: standard input)", "TEXT", nargs="*")
    add("--chat", "each prompt is a user's message, rendered by the chat template")
    add("--max-tokens", "most tokens to write (default: 256)", "N", type=at_least(1), default=256)
    greedy = "0: always the most probable token (default: 1)"
    add("--temperature", greedy, "T", type=_number(0, math.inf), default=1.0)
    top_k = "draw from the K most probable tokens (0: all)"
    add("--top-k", top_k, "K", type=at_least(0), default=0)
    top_p = "draw from the fewest that sum to P (1: all)"
    add("--top-p", top_p, "P", type=_number(1e-6, 1), default=1.0)
    seed = "the same seed gives the same text (default: 0)"
    add("--seed", seed, "N", type=at_least(0), default=0)
    add("--json", "print a JSON object")


def _number(low: float, high: float) -> Callable[[str], float]:
    def number(text: str) -> float:
        value = float(text)
        if not low <= value <= high:
            raise argparse.ArgumentTypeError(f"expected {low:g} to {high:g}, got {text}")
        return value

    return number


def _run(arguments: argparse.Namespace) -> str:
    check_weights(to_path(arguments.checkpoint))
    prompts = arguments.prompts or [sys.stdin.read().removesuffix("\n")]
    loaded = load_model(arguments)
    from titanlite.models.generate import Sampling

    say(loaded.summary)
    ids = encode_prompts(loaded, prompts, arguments.chat)
    sampling = Sampling(arguments.temperature, arguments.top_k, arguments.top_p, arguments.seed)
    started = time.perf_counter()
    found = []
    for begin in range(0, len(ids), _BATCH):
        some = ids[begin : begin + _BATCH]
        found += _continued(loaded, some, sampling, arguments.max_tokens, begin)
    tokens = sum(len(one["ids"]) for one in found)
    speed = tokens / (time.perf_counter() - started)
    if arguments.json:
        about = {"checkpoint": loaded.path, "step": loaded.step, **sampling._asdict()}
        samples = [{"prompt": prompt, **one} for prompt, one in zip(prompts, found, strict=True)]
        return to_json({**about, "tokens_per_second": speed, "samples": samples})
    say(f"{counted(tokens, 'tokens')}, {speed:,.1f} tokens/s")
    arguments.verbatim = True
    texts = []
    for prompt, one in zip(prompts, found, strict=True):
        lead = prompt
        if arguments.chat:
            lead = f"> {prompt}\n" if len(prompts) > 1 else ""
        texts.append(lead + one["text"])
    text = "\n\n".join(texts)
    # A terminal obeys no control characters that a model writes.
    return escape(text, verbatim=True) if sys.stdout.isatty() else text


def encode_prompts(loaded: LoadedModel, prompts: Sequence[str], chat: bool) -> list[list[int]]:
    """Return the ids of prompts: BOS and the text, or with `chat` the conversation.

    Raises DataError for a prompt over the context, or that the template refuses.
    """
    from titanlite.data import DataError
    from titanlite.data.chat import encode_chat, load_template

    tokenizer = loaded.tokenizer
    found: list[list[int]] = []
    if chat:
        day = loaded.template_date
        template = load_template(loaded.chat_template, tokenizer, day=day)
    for number, prompt in enumerate(prompts, 1):
        if chat:
            text = template.prompt([{"role": "user", "content": prompt}], f"prompt {number}")
            ids = encode_chat(text, tokenizer)[0].tolist()
        else:
            ids = tokenizer.encode(prompt, bos=True)
        if not 0 < len(ids) < loaded.limit:
            raise DataError(
                f"prompt {number} has {len(ids):,} tokens, and the model's context is "
                f"{loaded.limit:,}: shorten it, or lengthen the context with --context N"
            )
        found.append(ids)
    return found


def _continued(
    loaded: LoadedModel,
    prompts: Sequence[list[int]],
    sampling: Sampling,
    max_tokens: int,
    first_row: int,
) -> list[dict[str, Any]]:
    from titanlite.models.generate import generate, text_after

    written: list[list[int]] = [[] for _ in prompts]
    for step in generate(
        loaded.model,
        prompts,
        max_tokens=max_tokens,
        limit=loaded.limit,
        sampling=sampling,
        first_row=first_row,
        stop_ids=loaded.stop_ids,
        head=loaded.head,
        vocab=loaded.tokenizer.vocab_size,
    ):
        for ids, new in zip(written, step, strict=True):
            ids += [] if new is None else [new]
    found = []
    for prompt, ids in zip(prompts, written, strict=True):
        stopped = ids[-1] in loaded.stop_ids
        finish = "context" if len(prompt) + len(ids) >= loaded.limit else "length"
        found.append(
            {
                "text": text_after(loaded.tokenizer, prompt, ids[: len(ids) - stopped]),
                "ids": ids,
                "prompt_tokens": len(prompt),
                "finish": "stop" if stopped else finish,
            }
        )
    return found
