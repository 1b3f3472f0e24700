"""`titanlite eval`: EleutherAI's lm-evaluation-harness (package `lm_eval`) on a checkpoint, in this
process.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import sys
from collections.abc import Sequence
from typing import Any

from titanlite import exit_codes
from titanlite.checkpoint.paths import to_path
from titanlite.config.errors import ConfigError, Problem, bad_flag
from titanlite.tools import at_least
from titanlite.tools.commands.checkpoint_folders import check_weights
from titanlite.tools.commands.loading import add_arguments, load_model
from titanlite.tools.commands.runs import to_json
from titanlite.tools.parser import Commands, no_flags
from titanlite.utils import Style, escape

PACKAGE = "lm_eval"


def add_command(commands: Commands) -> None:
    """Add `eval` to argparse."""
    parser = commands.add_parser(
        "eval",
        help="run lm-evaluation-harness on a checkpoint",
        description="Run tasks of lm-evaluation-harness (pip install lm_eval) with the weights of "
        "a checkpoint, on one device. `titanlite evaluate` measures the loss on the "
        "held-out text of a config instead.",
        allow_abbrev=False,
    )
    add_arguments(parser)
    add = parser.add_argument
    add(
        "--tasks",
        required=True,
        metavar="NAMES",
        help="tasks or groups, separated by commas: hellaswag,arc_easy",
    )
    add("--include-path", metavar="FOLDER", help="folder with task files (YAML) of your own")
    add(
        "--num-fewshot",
        type=at_least(0),
        metavar="N",
        help="examples before each question (default: the task's own)",
    )
    add(
        "--limit",
        type=at_least(1),
        metavar="N",
        help="only the first N documents of each task, to try things out",
    )
    add(
        "--batch-size",
        type=at_least(1),
        default=8,
        metavar="N",
        help="sequences at once (default: 8)",
    )
    add(
        "--json",
        action="store_true",
        help="print a JSON object with the results and versions of the tasks",
    )
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace, flags: Sequence[str], _: Style) -> tuple[str, int]:
    no_flags(flags)
    check_weights(to_path(arguments.checkpoint))
    if importlib.util.find_spec(PACKAGE) is None:
        message = "lm-evaluation-harness is not installed: pip install lm_eval"
        raise ConfigError([Problem("command line", "--tasks", message, code="missing-package")])
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    from titanlite.tools.commands.harness_model import HarnessModel

    manager = TaskManager(include_path=arguments.include_path)
    tasks = arguments.tasks.split(",")
    unknown = [task for task in tasks if not manager.match_tasks([task])]
    if unknown:
        message = (
            f"no task {', '.join(unknown)}: `lm_eval ls tasks` lists them, --include-path adds "
            "yours"
        )
        raise bad_flag("--tasks", message)
    loaded = load_model(arguments)
    print(escape(loaded.summary), file=sys.stderr)
    # The harness prints its progress.
    with contextlib.redirect_stdout(sys.stderr):
        found = simple_evaluate(
            model=HarnessModel(loaded, arguments.batch_size),
            tasks=manager.match_tasks(tasks),
            num_fewshot=arguments.num_fewshot,
            limit=arguments.limit,
            task_manager=manager,
            log_samples=False,
        )
    if arguments.json:
        result = {
            "checkpoint": loaded.path,
            "step": loaded.step,
            "limit": arguments.limit,
            "results": found["results"],
            "versions": found["versions"],
        }
        return to_json(result), exit_codes.DONE
    return _tables(found), exit_codes.DONE


def _tables(found: Any) -> str:
    """Return the harness's results as its own tables."""
    from lm_eval.utils import make_table

    tables = [make_table(found)]
    if found.get("groups"):
        tables.append(make_table(found, "groups"))
    return "\n".join(tables).rstrip()
