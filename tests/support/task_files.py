"""Files of tasks, runs with them, and their figures."""

from __future__ import annotations

import contextlib
import io
import json
import random
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch

from tests.support.whole_runs import losses_of, make_trainer, outcome_of, train_run
from titanlite.cli.main import main as command
from titanlite.dist.dist_env import DistEnv
from titanlite.features.tasks.run import TaskRun
from titanlite.trainer import Trainer

TEXTS = ["The first of all", "Some words that go on " * 12, "Naïve – 日本", "a b c", "And"]
SHORT = ["--training.steps=4", "--checkpoint.interval=4", "--no-validation.enable"]
_DATA = "dataset_path: json\ndataset_kwargs:\n  data_files:\n    test: {file}\ntest_split: test\n"
CHOICE = (
    "output_type: multiple_choice\ndoc_to_text: '{{text}}'\n"
    "doc_to_choice: ['a cat', ' dogs, and on']\ndoc_to_target: 0\n"
    "metric_list: [{metric: acc}, {metric: acc_norm}]\n"
)
TASKS = {
    "tiny_choice": CHOICE,
    "tiny_shots": CHOICE + "num_fewshot: 2\nfewshot_split: test\n",
    "tiny_rolling": "output_type: loglikelihood_rolling\ndoc_to_text: ''\n"
    "doc_to_target: '{{text}}'\nmetric_list: [{metric: word_perplexity}, "
    "{metric: bits_per_byte}]\n",
}
#: Continues texts.
_UNTIL = (
    "output_type: generate_until\ndoc_to_text: '{{text}}'\n"
    "doc_to_target: '{{text}}'\ngeneration_kwargs: {until: [' t', 'e e'], max_gen_toks: 6}\n"
    "metric_list: [{metric: exact_match}]\n"
)
#: The entry of a task whose own function raises an error.
_FAILS = "process_results: !function fails.fail\n"


def write_tasks(folder: Path, texts: Sequence[str] = TEXTS) -> Path:
    """Write the task files, and one whose code fails."""
    file = folder / "texts.jsonl"
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    data = _DATA.format(file=file)
    for name, lines in {**TASKS, "tiny_broken": CHOICE + _FAILS, "tiny_until": _UNTIL}.items():
        (folder / f"{name}.yaml").write_text(f"task: {name}\n{data}{lines}")
    (folder / "tiny_group.yaml").write_text(
        "group: tiny_group\ntask: [tiny_choice, tiny_shots]\n"
        "aggregate_metric_list: [{metric: acc, weight_by_size: true}]\n"
    )
    (folder / "fails.py").write_text("def fail(doc, results):\n    raise KeyError('gold')\n")
    return folder


@contextlib.contextmanager
def without_shipped_tasks() -> Iterator[None]:
    """Let the harness know the tasks of a test alone: it reads its shipped files, some
    thousands, for seconds.
    """
    from lm_eval import tasks

    manager = partial(tasks.TaskManager, include_defaults=False)
    with patch.object(tasks, "TaskManager", manager):
        yield


def quickly(world: DistEnv, job: Callable[..., Any], *arguments: Any) -> Any:
    """Do a job of a rank without the tasks of the harness."""
    with without_shipped_tasks():
        return job(world, *arguments)


def flags_of(folder: Path, *names: str, freq: int = 2) -> list[str]:
    """Return the flags of a run with tasks of `write_tasks`; without names with all that it can
    run.
    """
    listed = ", ".join(f"'{name}'" for name in names or TASKS)
    more = [f"--eval.freq={freq}", "--eval.batch_size=3", f"--eval.include_path={folder}"]
    return [f"--eval.tasks=[{listed}]", *more]


def scores_of(rows: list[dict[str, Any]]) -> dict[int, dict[str, float]]:
    """The figures of tasks in metrics.jsonl, by step."""
    found: dict[int, dict[str, float]] = {}
    for row in rows:
        figures = {name: value for name, value in row.items() if name.startswith("eval/")}
        if figures:
            assert row["step"] not in found, "once for each step"
            found[row["step"]] = figures
    return found


def evaluated(
    checkpoint: Path, folder: Path, *names: str, flags: tuple[str, ...] = ()
) -> dict[str, float]:
    """What `titanlite eval` says, under the names of a run."""
    said = io.StringIO()
    with without_shipped_tasks(), contextlib.redirect_stdout(said):
        words = ["eval", str(checkpoint), "--tasks", ",".join(names or TASKS), "--device=cpu"]
        words += ["--include-path", str(folder), "--json", "--batch-size=3"]
        assert command([*words, *flags]) == 0
    return figures_of(json.loads(said.getvalue())["results"])


def figures_of(results: dict[str, dict[str, Any]]) -> dict[str, float]:
    """Figures of the harness, under the names of a run."""
    found = {}
    for task, row in results.items():
        for metric, value in row.items():
            if isinstance(value, float) and "stderr" not in metric:
                found[f"eval/{task}/{metric.removesuffix(',none')}"] = value
    return found


def task_run(trainer: Trainer) -> Any:
    """What runs the tasks of a run."""
    (found,) = [one for one in trainer.callbacks.all if isinstance(one, TaskRun)]
    return found


def with_and_without(world: DistEnv, folder: str, tasks: list[str], *flags: str) -> dict[str, Any]:
    """A run without and one with tasks, whose losses and generators are the same."""
    bare = train_run(world, f"{folder}/bare", *SHORT, *flags)
    states = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state()
    trainer = make_trainer(world, folder, *SHORT, *flags, *tasks)
    found = outcome_of(trainer, folder)
    assert (found["error"], bare["error"]) == ("", "")
    assert losses_of(bare["rows"]) == losses_of(found["rows"]), "to the last bit"
    assert random.getstate() == states[0]
    assert np.random.get_state()[1].tolist() == states[1]
    assert torch.equal(torch.get_rng_state(), states[2])
    assert trainer.parts.model.training
    return found
