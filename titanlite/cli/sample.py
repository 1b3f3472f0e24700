"""`titanlite sample`: continue prompts with the weights of a checkpoint.

No torch until the prompts are read.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from titanlite.checkpoint.store_paths import to_path
from titanlite.cli.argument_parser import Commands, new_command
from titanlite.cli.checkpoint_folders import check_weights
from titanlite.cli.loading import LoadedModel, add_arguments, load_model
from titanlite.cli.run_figures import to_json
from titanlite.data import DataError
from titanlite.metrics.console import setup_console
from titanlite.utils import counted, escape, say

if TYPE_CHECKING:
    from titanlite.models.generate import Sampling


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
    add("--max-tokens", "most tokens to write (default: 256)", "N", type=int, default=256)
    greedy = "0: always the most probable token (default: 1)"
    add("--temperature", greedy, "T", type=float, default=1.0)
    add("--top-k", "draw from the K most probable tokens (0: all)", "K", type=int, default=0)
    add("--top-p", "draw from the fewest that sum to P (1: all)", "P", type=float, default=1.0)
    add("--seed", "the same seed gives the same text (default: 0)", "N", type=int, default=0)
    add("--json", "print a JSON object")


def _run(arguments: argparse.Namespace) -> str:
    numbers = (arguments.temperature, arguments.top_k, arguments.top_p, arguments.seed)
    _check(arguments.max_tokens, *numbers)
    check_weights(to_path(arguments.checkpoint))
    prompts = arguments.prompts or [sys.stdin.read().removesuffix("\n")]
    setup_console(0, None, sys.stderr)  # standard output has the result alone
    loaded = load_model(arguments)
    from titanlite.models.generate import Sampling

    say(loaded.summary)
    sampling = Sampling(*numbers)
    started = time.perf_counter()
    found = _continued(loaded, prompts, arguments.chat, arguments.max_tokens, sampling)
    tokens = sum(len(one["ids"]) for one in found)
    speed = tokens / (time.perf_counter() - started)
    if arguments.json:
        about = {"checkpoint": loaded.path, "step": loaded.step, **sampling._asdict()}
        samples = [{"prompt": prompt, **one} for prompt, one in zip(prompts, found, strict=True)]
        return to_json({**about, "tokens_per_second": speed, "samples": samples})
    say(f"{counted(tokens, 'tokens')}, {speed:,.1f} tokens/s")
    arguments.verbatim = True
    texts = [one["text"] for one in found]
    if not arguments.chat:
        texts = [prompt + text for prompt, text in zip(prompts, texts, strict=True)]
    text = "\n\n".join(texts)
    # A terminal obeys no control characters that a model writes.
    return escape(text, verbatim=True) if sys.stdout.isatty() else text


def generate(  # noqa: PLR0913
    checkpoint: str | Path,
    prompt: str,
    *,
    chat: bool = False,
    max_tokens: int = 256,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    seed: int = 0,
    device: str | None = None,
    dtype: str | None = None,
    tokenizer: str | None = None,
    ema: bool = False,
    trust_code: bool = False,
) -> str:
    """Return what a model adds to a prompt, as `titanlite sample` writes it.

    checkpoint: a run, a folder of checkpoints (the newest valid one), one step-N, or a Hugging Face
    folder. It is loaded at each call.
    chat: the prompt is a user's message, rendered by the chat template.
    temperature: 0 takes always the most probable token.
    top_k: draw from this many of the most probable tokens (0: all).
    top_p: draw from the fewest that sum to it.
    device: "cpu", "cuda" or "cuda:1"; by default a GPU if there is one.
    dtype: "float32", "bfloat16" or "float16"; by default bfloat16 on a GPU, else float32.
    trust_code: import the model that a checkpoint names (SECURITY.md).

    Raises CheckpointError, ConfigError (device, dtype, untrusted code) and DataError (tokenizer,
    prompt, a number out of its range).
    """
    from titanlite.models.generate import Sampling

    _check(max_tokens, temperature, top_k, top_p, seed)
    options = {"device": device, "dtype": dtype, "tokenizer": tokenizer, "ema": ema}
    loaded = load_model(
        argparse.Namespace(
            checkpoint=checkpoint, trust_code=trust_code, base=None, context=None, **options
        )
    )
    sampling = Sampling(temperature, top_k, top_p, seed)
    text: str = _continued(loaded, [prompt], chat, max_tokens, sampling)[0]["text"]
    return text


def _check(max_tokens: int, temperature: float, top_k: int, top_p: float, seed: int) -> None:
    if not (max_tokens >= 1 and temperature >= 0 and top_k >= 0 and 0 < top_p <= 1 and seed >= 0):
        raise DataError(
            "expected max-tokens >= 1, temperature >= 0, top-k >= 0, 0 < top-p <= 1 and seed >= 0"
        )


def _continued(
    loaded: LoadedModel, prompts: Sequence[str], chat: bool, max_tokens: int, sampling: Sampling
) -> list[dict[str, Any]]:
    """Return text, ids, prompt_tokens and finish of each prompt. Raises DataError."""
    encoded = []
    for number, prompt in enumerate(prompts, 1):
        if chat:
            ids = loaded.encode_chat([{"role": "user", "content": prompt}], f"prompt {number}")
        else:
            ids = loaded.tokenizer.encode(prompt, bos=True)
        if not 0 < len(ids) < loaded.limit:
            raise DataError(
                f"prompt {number} has {len(ids):,} tokens, and the model's context is "
                f"{loaded.limit:,}: shorten it, or lengthen the context with --context N"
            )
        encoded.append(ids)
    found = []
    for number, ids in enumerate(encoded):
        written, text = loaded.write(ids, max_tokens, sampling, number)
        finish = "context" if len(ids) + len(written) >= loaded.limit else "length"
        if written[-1] in loaded.stop_ids:
            finish = "stop"
        found.append({"text": text, "ids": written, "prompt_tokens": len(ids), "finish": finish})
    return found
