"""`titanlite eval`: measure a checkpoint on held-out text, or by tasks."""

from __future__ import annotations

import argparse

from titanlite.cli import eval_tasks, eval_text
from titanlite.cli.loading import add_arguments
from titanlite.cli.parser import FLAGS, Commands, new_command, no_flags
from titanlite.config.errors import bad_flag

_TEXT = ("file", "nproc_per_node")
_TASKS = tuple(
    [
        "device",
        "base",
        "dtype",
        "tokenizer",
        "context",
        "include_path",
        "num_fewshot",
        "limit",
        "batch_size",
        "text_key",
        "ema",
    ]
)


def add_command(commands: Commands) -> None:
    """Add `eval` to argparse."""
    parser = new_command(
        commands,
        _run,
        "eval",
        "measure a checkpoint on held-out text, or by tasks",
        "Print loss, perplexity and tokens of each validation text of a config, with the weights "
        "of a checkpoint. With --tasks: run tasks of lm-evaluation-harness (pip install "
        "'titanlite[eval]') or files of your own, as docs/evaluation.md shows them, on one device. "
        "Nothing is trained or written. A process that torchrun starts is one of its ranks.",
        f"{FLAGS} Such as --validation.steps -1 for a full pass; not with --tasks. Exit status: "
        "docs/reliability.md lists it.",
    )
    add_arguments(parser)
    parser.add("file", "TOML file (default: the config in the checkpoint)", "CONFIG", nargs="?")
    parser.add("--nproc-per-node", "start N ranks on this machine with torchrun", "N", type=int)
    eval_tasks.add_options(parser)
    parser.add("--json", "print a JSON object")


def _run(arguments: argparse.Namespace) -> tuple[str, int]:
    unused, why = (_TASKS, "needs --tasks") if arguments.tasks is None else (_TEXT, "is for text")
    for name in unused:
        if getattr(arguments, name) not in (None, False):
            shown = "CONFIG" if name == "file" else f"--{name.replace('_', '-')}"
            raise bad_flag(shown, why)
    if arguments.tasks is None:
        eval_text.run(arguments)
    no_flags(arguments.flags)
    return eval_tasks.run(arguments)
