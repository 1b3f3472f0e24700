"""Tasks on a checkpoint, in this process: `titanlite eval --tasks`.

They are those of EleutherAI's lm-evaluation-harness (package `lm_eval`), or in files of one's own.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from titanlite import exit_codes
from titanlite.checkpoint.paths import to_path
from titanlite.cli import at_least
from titanlite.cli.checkpoint_folders import check_weights
from titanlite.cli.loading import LoadedModel, load_model
from titanlite.cli.parser import Parser
from titanlite.cli.run_figures import to_json
from titanlite.config.errors import ConfigError, bad_flag, refuse
from titanlite.data import DataError
from titanlite.features.tasks.entries import entry_problems, is_file
from titanlite.utils import Table, render, say

if TYPE_CHECKING:
    from titanlite.features.tasks.harness import HarnessTask
    from titanlite.features.tasks.own_files import ChoiceTask, TextTask
    from titanlite.features.tasks.scoring import Scorer

_TASKS = "--tasks"
#: Resamples of the harness for its standard errors, as its own command has them.
_BOOTSTRAP = 100_000


def add_options(parser: Parser) -> None:
    """Add the options of tasks to argparse."""
    add = parser.add
    add(
        _TASKS,
        "tasks, groups or files, separated by commas: hellaswag,arc_easy,./quiz.jsonl",
        "NAMES",
    )
    add("--include-path", "folder with task files (YAML) of your own", "FOLDER")
    add(
        "--num-fewshot",
        "examples before each question (default: the task's own)",
        "N",
        type=at_least(0),
    )
    add(
        "--limit",
        "only the first N documents of each task, to try things out",
        "N",
        type=at_least(1),
    )
    add("--batch-size", "sequences at once (default: 8)", "N", type=at_least(1))
    add(
        "--text-key",
        "field of the texts in a file of yours (default: text)",
        "NAME",
    )


def run(arguments: argparse.Namespace) -> tuple[str, int]:
    """Return the figures of the tasks as text or JSON, and the exit code."""
    check_weights(to_path(arguments.checkpoint))
    entries = arguments.tasks.split(",")
    own = _own_tasks(entries, arguments)
    harness = _harness_tasks(entries, arguments)
    loaded = load_model(arguments)
    say(loaded.summary)
    scorer = _scorer(loaded, arguments.batch_size or 8)
    # The harness prints its progress.
    with contextlib.redirect_stdout(sys.stderr):
        figures = {task.name: task.run(scorer) for task in own}
        found = None if harness is None else harness.evaluate(scorer, _BOOTSTRAP)
    if not arguments.json:
        return "\n".join([*_own_table(figures), *_tables(found)]), exit_codes.DONE
    result = {
        "checkpoint": loaded.path,
        "step": loaded.step,
        "limit": arguments.limit,
        "results": {**figures, **(found["results"] if found else {})},
        "versions": found["versions"] if found else {},
    }
    return to_json(result), exit_codes.DONE


def _own_tasks(
    entries: Sequence[str], arguments: argparse.Namespace
) -> list[TextTask | ChoiceTask]:
    """Read the files of one's own. Raises DataError, and ConfigError for equal names."""
    from titanlite.features.tasks.own_files import read_own

    files = [entry for entry in entries if is_file(entry)]
    refuse([replace(found, where="command line") for found in entry_problems(files, _TASKS)])
    try:
        return [read_own(path, arguments.text_key or "text", arguments.limit) for path in files]
    except DataError as error:
        raise DataError(str(error).replace("data.text_key", "--text-key")) from error


def _harness_tasks(entries: Sequence[str], arguments: argparse.Namespace) -> HarnessTask | None:
    """Return the harness's tasks as one, None without any. Raises ConfigError."""
    names = [entry for entry in entries if not is_file(entry)]
    if not names:
        return None
    from titanlite.features.tasks.harness import (
        HarnessTask,
        load_problem,
        open_manager,
        unknown_names,
    )

    manager = open_manager(arguments.include_path, _TASKS)
    unknown = unknown_names(manager, names)
    if unknown:
        message = (
            f"no task {', '.join(unknown)}: `lm_eval ls tasks` lists them, --include-path adds "
            "yours"
        )
        raise bad_flag(_TASKS, message)
    task = HarnessTask("", manager, arguments.num_fewshot, arguments.limit)
    problem = load_problem(task, manager.match_tasks(names), _TASKS)
    if problem is not None:
        raise ConfigError([problem])
    return task


def _scorer(loaded: LoadedModel, batch_size: int) -> Scorer:
    from tqdm import tqdm

    from titanlite.features.tasks.scoring import Scorer, Subject
    from titanlite.step import PlainRunner

    subject = Subject(
        loaded.model,
        loaded.tokenizer,
        loaded.limit,
        loaded.device,
        loaded.head,
        loaded.stop_ids,
    )
    return Scorer(subject, PlainRunner(loaded.model), batch_size, progress=tqdm)


def _own_table(figures: dict[str, dict[str, float]]) -> list[str]:
    """Return the figures of one's own files as a table, if there are some."""
    lines = []
    for name, row in figures.items():
        for metric, value in row.items():
            lines.append((name, metric, f"{value:.4f}"))
    if not lines:
        return []
    return [render(Table(("task", "figure", "value"), lines, (0, 1)))]


def _tables(found: Any) -> list[str]:
    """Return the harness's results as its own tables."""
    if found is None:
        return []
    from lm_eval.utils import make_table

    tables = [make_table(found)]
    if found.get("groups"):
        tables.append(make_table(found, "groups"))
    return ["\n".join(tables).rstrip()]
