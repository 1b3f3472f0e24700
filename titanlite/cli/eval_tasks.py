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
from titanlite.config.errors import refuse
from titanlite.data import DataError
from titanlite.features.tasks.entries import entry_problems, harness_names, is_file
from titanlite.utils import say

if TYPE_CHECKING:
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
    from titanlite.features.tasks.harness import load_tasks

    harness = load_tasks(
        harness_names(entries),
        arguments.include_path,
        arguments.num_fewshot,
        arguments.limit,
        _TASKS,
    )
    loaded = load_model(arguments)
    say(loaded.summary)
    scorer = _scorer(loaded, arguments.batch_size or 8)
    found: dict[str, Any] = {"results": {}, "versions": {}}
    # The harness prints its progress.
    with contextlib.redirect_stdout(sys.stderr):
        figures = {task.name: task.run(scorer) for task in own}
        for task in harness:
            for name, part in task.evaluate(scorer, _BOOTSTRAP).items():
                if isinstance(part, dict):
                    found[name] = {**found.get(name, {}), **part}
    if not arguments.json:
        from titanlite.features.tasks.run import figures_table

        tables = [figures_table(figures)]
        if harness:
            from lm_eval.utils import make_table

            tables.append(make_table(found))
            if found.get("groups"):
                tables.append(make_table(found, "groups"))
        return "\n".join(filter(None, tables)).rstrip(), exit_codes.DONE
    result = {
        "checkpoint": loaded.path,
        "step": loaded.step,
        "limit": arguments.limit,
        "results": {**figures, **found["results"]},
        "versions": found["versions"],
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
