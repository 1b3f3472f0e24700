"""Tasks of lm-evaluation-harness in a run: the figures of `titanlite eval`, and of the harness's
own backend on the exported model.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn
from unittest.mock import patch

import httpx
import pytest

from tests.support.pool import Pools
from tests.support.processes import ROOT, titanlite
from tests.support.task_files import SHORT, evaluated, scores_of, task_run, with_and_without
from tests.support.whole_runs import make_trainer, outcome_of
from titanlite import exit_codes
from titanlite.cli.main import main
from titanlite.config.errors import ConfigError
from titanlite.dist.dist_env import DistEnv
from titanlite.features.tasks.harness import HarnessTask, load_problem

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("lm_eval") is None,
        reason="lm_eval is not installed: tasks of the harness are NOT tested",
    ),
]
_DATA = "dataset_path: json\ndataset_kwargs:\n  data_files:\n    test: {file}\ntest_split: test\n"
_CHOICE = (
    "output_type: multiple_choice\ndoc_to_text: '{{text}}'\n"
    "doc_to_choice: ['a cat', 'dogs, and on']\ndoc_to_target: 0\n"
    "metric_list: [{metric: acc}, {metric: acc_norm}]\n"
)
TASKS = {
    "tiny_choice": _CHOICE,
    "tiny_shots": _CHOICE + "num_fewshot: 2\nfewshot_split: test\n",
    "tiny_rolling": "output_type: loglikelihood_rolling\ndoc_to_text: ''\n"
    "doc_to_target: '{{text}}'\nmetric_list: [{metric: word_perplexity}, "
    "{metric: bits_per_byte}]\n",
    "tiny_until": "output_type: generate_until\ndoc_to_text: '{{text}}'\n"
    "doc_to_target: '{{text}}'\ngeneration_kwargs: {until: [' t', 'e e'], max_gen_toks: 6}\n"
    "metric_list: [{metric: exact_match}]\n",
}
#: Of the harness with a code of its own that fails.
_FAILS = "process_results: !function fails.fail\n"


def write_tasks(folder: Path) -> Path:
    """Write the task files, and one whose code fails."""
    file = folder / "texts.jsonl"
    texts = ["The first of all", "Some words that go on " * 12, "Naïve – 日本", "a b c", "And"]
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    data = _DATA.format(file=file)
    for name, lines in {**TASKS, "tiny_broken": _CHOICE + _FAILS}.items():
        (folder / f"{name}.yaml").write_text(f"task: {name}\n{data}{lines}")
    (folder / "tiny_group.yaml").write_text(
        "group: tiny_group\ntask: [tiny_choice, tiny_shots]\n"
        "aggregate_metric_list: [{metric: acc, weight_by_size: true}]\n"
    )
    (folder / "fails.py").write_text("def fail(doc, results):\n    raise KeyError('gold')\n")
    return folder


@pytest.fixture
def tasks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "tasks"
    folder.mkdir()
    return write_tasks(folder)


@contextlib.contextmanager
def _without_shipped_tasks() -> Iterator[None]:
    """Let the harness know the tasks of a test alone: it reads its shipped files, some
    thousands, for seconds in each rank.
    """
    from lm_eval import tasks

    manager = partial(tasks.TaskManager, include_defaults=False)
    with patch.object(tasks, "TaskManager", manager):
        yield


def _quickly(world: DistEnv, job: Callable[..., Any], *arguments: Any) -> Any:
    """Do a job of a rank without the tasks of the harness."""
    with _without_shipped_tasks():
        return job(world, *arguments)


def _flags(folder: Path, *names: str) -> list[str]:
    listed = ", ".join(f"'{name}'" for name in names)
    more = ["--eval.freq=2", "--eval.batch_size=3", f"--eval.include_path={folder}"]
    return [f"--eval.tasks=[{listed}]", *more]


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_figures_are_those_of_the_command_and_of_the_harness_on_the_export(
    pool: Pools, tmp_path: Path, tasks: Path, ranks: int
) -> None:
    # One rank alone also knows the tasks that the harness ships.
    is_alone = ranks == 1
    job = (with_and_without,) if is_alone else (_quickly, with_and_without)
    found = pool(ranks).run(*job, str(tmp_path / "run"), _flags(tasks, *TASKS))[0]
    scores = scores_of(found["rows"])
    assert sorted(scores) == [2, 4]
    checkpoint = tmp_path / "run" / "checkpoint" / "step-4"
    path = ("--include-path", str(tasks))
    with contextlib.nullcontext() if is_alone else _without_shipped_tasks():
        assert scores[4] == evaluated(checkpoint, *TASKS, flags=path)
    assert any(name.endswith("tiny_rolling/bits_per_byte") for name in scores[4])
    if not is_alone:
        return
    theirs = _of_own_backend(checkpoint, tmp_path / "export", tasks)
    assert {name: scores[4][name] for name in theirs} == pytest.approx(theirs, rel=1e-5)


def _of_own_backend(checkpoint: Path, export: Path, tasks: Path) -> dict[str, float]:
    """What the harness's own backend finds of the exported model."""
    import lm_eval
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    assert main(["export", str(checkpoint), str(export)]) == 0
    names = ["tiny_choice", "tiny_shots", "tiny_rolling"]
    model = HFLM(
        pretrained=str(export), device="cpu", dtype="float32", add_bos_token=True, max_length=32
    )
    manager = TaskManager(include_path=str(tasks), include_defaults=False)
    found = lm_eval.simple_evaluate(model, tasks=names, task_manager=manager)
    figures = {}
    for name in names:
        for metric, value in found["results"][name].items():
            if isinstance(value, float) and "stderr" not in metric:
                figures[f"eval/{name}/{metric.removesuffix(',none')}"] = value
    assert len(figures) == 6
    return figures


def test_tasks_that_fail_in_their_code_or_lack_their_data_leave_the_others(
    pool: Pools, tmp_path: Path, tasks: Path
) -> None:
    flags = _flags(tasks, "tiny_broken", "tiny_rolling", "tiny_group")
    found = pool(2).run(_quickly, _lost_data, str(tmp_path / "run"), flags)[0]
    assert found["code"] == 0
    assert list(scores_of(found["rows"])[4]) == ["eval/tiny_group/acc"]
    failed, lost = [line for line in found["said"] if "training continues without it" in line]
    assert failed.endswith("tiny_broken failed, training continues without it: KeyError: 'gold'")
    assert lost.endswith("tiny_rolling failed, training continues without it: OSError: it is gone")


def _lost_data(world: DistEnv, folder: str, flags: list[str]) -> dict[str, Any]:
    """The data of a task is gone after the start."""
    trainer = make_trainer(world, folder, *SHORT, *flags)
    if world.rank == 0:
        rolling = task_run(trainer)._tasks[1]
        (task,) = rolling.loaded["tasks"].values()

        def gone() -> NoReturn:
            raise OSError("it is gone")

        task.test_docs = gone
    return outcome_of(trainer, folder)


def _refused(world: DistEnv, folder: str, flags: list[str]) -> str:
    with pytest.raises(ConfigError) as caught:
        make_trainer(world, folder, *SHORT, *flags)
    return str(caught.value)


def test_what_cannot_be_run_is_refused_at_the_start(
    pool: Pools, tmp_path: Path, tasks: Path
) -> None:
    folder = str(tmp_path / "run")
    (said,) = pool(1).run(_refused, folder, _flags(tasks, "tiny_choice", "no_such_task"))
    assert "eval.tasks: the harness has no task 'no_such_task'" in said
    (tasks / "texts.jsonl").rename(tasks / "moved.jsonl")
    (said,) = pool(1).run(_quickly, _refused, folder, _flags(tasks, "tiny_rolling"))
    assert "eval.tasks: the task tiny_rolling cannot be loaded: FileNotFoundError" in said
    (tasks / "moved.jsonl").rename(tasks / "texts.jsonl")
    stages = [*_flags(tasks, "tiny_until"), "--experimental.pipeline_parallel_degree=2"]
    said = pool(2).run(_quickly, _refused, folder, [*stages, "--training.batch_size=2"])[0]
    assert "the task tiny_until continues texts" in said
    (said,) = pool(1).run(_refused, folder, _flags(tasks / "none", "tiny_choice"))
    assert "eval.include_path: there is no folder" in said


def test_a_run_without_network_and_cache_is_refused_before_its_first_step(tmp_path: Path) -> None:
    (tmp_path / "far.yaml").write_text(f"task: far\ndataset_path: some/texts\n{_CHOICE}")
    config = ROOT / "train_configs" / "debug_model.toml"
    words = ["train", config, *_flags(tmp_path, "far"), f"--job.dump_folder={tmp_path}/run"]
    offline = {"HF_DATASETS_OFFLINE": "1", "HF_HOME": str(tmp_path / "cache")}
    done = titanlite(*words, env=offline)
    assert done.returncode == exit_codes.CONFIG, done.stderr
    assert "Traceback" not in done.stderr
    assert "eval.tasks: the task far cannot be loaded: the data set some/texts is " in done.stderr
    assert "`titanlite eval CHECKPOINT --tasks far --limit 1` on a machine with" in done.stderr
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (ConnectionError("Couldn't reach 'a/b' on the Hub (x)"), "the data set a/b is not in the"),
        (httpx.ConnectError("refused"), "data that is not on this machine is not in the cache"),
        (ValueError("no split"), "the task one cannot be loaded: ValueError: no split"),
    ],
)
def test_the_command_tells_why_a_task_cannot_be_loaded(error: Exception, said: str) -> None:
    def load(names: object) -> NoReturn:
        raise error

    manager = SimpleNamespace(load=load, match_tasks=list)
    problem = load_problem(HarnessTask("one", manager), "--tasks")
    assert problem is not None
    assert said in str(problem)
    assert str(problem).startswith("--tasks: the task one cannot be loaded: ")
    assert ("HF_DATASETS_OFFLINE=1" in str(problem)) is not isinstance(error, ValueError)
