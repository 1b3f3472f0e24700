"""`titanlite eval`: measure a checkpoint on held-out text, or by tasks.

Tasks run in this process. They are those of EleutherAI's lm-evaluation-harness (package `lm_eval`).
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from typing import Any

from titanlite import exit_codes
from titanlite.checkpoint.store_paths import to_path
from titanlite.cli import at_least
from titanlite.cli.argument_parser import FLAGS, Commands, new_command, no_flags
from titanlite.cli.checkpoint_folders import check_weights
from titanlite.cli.eval_losses import evaluate_rank
from titanlite.cli.loading import add_arguments, load_model
from titanlite.cli.run_figures import to_json
from titanlite.config.errors import bad_flag
from titanlite.metrics.console import setup_console
from titanlite.utils import say

#: Options that need --tasks.
_OF_TASKS = (
    "device",
    "base",
    "dtype",
    "tokenizer",
    "context",
    "include_path",
    "num_fewshot",
    "limit",
    "batch_size",
    "ema",
)
#: Resamples of the harness for its standard errors, as its own command has them.
_BOOTSTRAP = 100_000


def add_command(commands: Commands) -> None:
    """Add `eval` to argparse."""
    parser = new_command(
        commands,
        _run,
        "eval",
        "measure a checkpoint on held-out text, or by tasks",
        "Print loss, perplexity and tokens of each validation text of a config, with the weights "
        "of a checkpoint. With --tasks: run tasks of lm-evaluation-harness (pip install "
        "'titanlite[eval]') on one device. Nothing is trained or written. A process that torchrun "
        "starts is one of its ranks.",
        f"{FLAGS} Such as --validation.steps -1 for a full pass; not with --tasks. Exit status: "
        "docs/reliability.md lists it.",
    )
    add_arguments(parser)
    add = parser.add
    add("file", "TOML file (default: the config in the checkpoint)", "CONFIG", nargs="?")
    add("--tasks", "tasks, groups or tags, separated by commas: hellaswag,arc_easy", "NAMES")
    add("--include-path", "folder with task files (YAML) of your own", "FOLDER")
    shots = "examples before each question (default: the task's own)"
    add("--num-fewshot", shots, "N", type=at_least(0))
    limit = "only the first N documents of each task, to try things out"
    add("--limit", limit, "N", type=at_least(1))
    add("--batch-size", "sequences at once (default: 8)", "N", type=at_least(1))
    add("--json", "print a JSON object")


def _run(arguments: argparse.Namespace) -> tuple[str, int]:
    if arguments.tasks is None:
        for name in _OF_TASKS:
            if getattr(arguments, name) not in (None, False):
                raise bad_flag(f"--{name.replace('_', '-')}", "needs --tasks")
        from titanlite import main

        main.run_rank(evaluate_rank, arguments)
    if arguments.file:
        raise bad_flag("CONFIG", "is for text, not for --tasks")
    no_flags(arguments.flags)
    check_weights(to_path(arguments.checkpoint))
    names = arguments.tasks.split(",")
    from titanlite.features.tasks.harness import load_tasks

    tasks = load_tasks(
        names, arguments.include_path, arguments.num_fewshot, arguments.limit, "--tasks"
    )
    setup_console(0, None, sys.stderr)  # standard output has the result alone
    loaded = load_model(arguments)
    say(loaded.summary)
    from lm_eval.utils import make_table
    from tqdm import tqdm

    from titanlite.features.tasks.scoring import Scorer, Subject
    from titanlite.step import PlainRunner

    subject = Subject(loaded.model, loaded.tokenizer, loaded.limit, loaded.device)
    size = arguments.batch_size or 8
    scorer = Scorer(subject, PlainRunner(loaded.model), size, progress=tqdm)
    found: dict[str, Any] = {}
    # The harness prints its progress.
    with contextlib.redirect_stdout(sys.stderr):
        for task in tasks:
            for name, part in task.evaluate(scorer, _BOOTSTRAP).items():
                if isinstance(part, dict):
                    found[name] = {**found.get(name, {}), **part}
    if arguments.json:
        about = {"checkpoint": loaded.path, "step": loaded.step, "limit": arguments.limit}
        figures = {name: found[name] for name in ("results", "versions")}
        return to_json({**about, **figures}), exit_codes.DONE
    tables = [make_table(found)]
    if found.get("groups"):
        tables.append(make_table(found, "groups"))
    return "\n".join(tables).rstrip(), exit_codes.DONE
