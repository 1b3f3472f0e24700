"""Tasks in a run: their figures are those of `titanlite eval` on any ranks and of the harness's own
backend on the exported model, training does not notice them, and a broken task ends nothing.
"""

from __future__ import annotations

import importlib.util
import re
import time
from pathlib import Path
from typing import Any

import pytest

from tests.support.pool import Pools
from tests.support.processes import ROOT, python
from tests.support.task_files import (
    SHORT,
    TASKS,
    evaluated,
    figures_of,
    flags_of,
    quickly,
    scores_of,
    task_run,
    with_and_without,
    write_tasks,
)
from tests.support.tiny import TWENTY_STEPS
from tests.support.whole_runs import losses_of, make_trainer, outcome_of, scalars, train_run
from titanlite import exit_codes
from titanlite.cli.main import main
from titanlite.cli.runs import _as_json
from titanlite.config.errors import ConfigError
from titanlite.config.trust_claims import config_claims
from titanlite.dist.dist_env import DistEnv
from titanlite.runs.read import read_run
from titanlite.runs.read_jsonl import read_metrics

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("lm_eval") is None,
    reason="lm_eval is not installed: tasks of the harness are NOT tested",
)


@pytest.fixture
def tasks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "tasks"
    folder.mkdir()
    return write_tasks(folder)


@pytest.mark.slow
def test_figures_are_those_of_the_command_and_of_the_harness_on_the_export(pool, tmp_path, tasks):
    words = (str(tmp_path / "run"), flags_of(tasks))
    found = pool(1).run(quickly, with_and_without, *words)[0]
    scores = scores_of(found["rows"])
    assert sorted(scores) == [2, 4]
    checkpoint = tmp_path / "run" / "checkpoint" / "step-4"
    assert scores[4] == evaluated(checkpoint, tasks)
    assert scores[2] != scores[4]
    name = "eval/tiny_rolling/bits_per_byte"
    said = [line for line in found["said"] if "bits_per_byte" in line][-1]
    assert said.split() == ["tiny_rolling", "bits_per_byte", f"{scores[4][name]:.4f}"]
    theirs = _of_own_backend(checkpoint, tmp_path / "export", tasks)
    assert {name: scores[4][name] for name in theirs} == pytest.approx(theirs, rel=1e-5)


def _of_own_backend(checkpoint: Path, export: Path, tasks: Path) -> dict[str, float]:
    """What the harness's own backend finds of the exported model."""
    import lm_eval
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    assert main(["export", str(checkpoint), str(export)]) == 0
    model = HFLM(
        pretrained=str(export), device="cpu", dtype="float32", add_bos_token=True, max_length=32
    )
    manager = TaskManager(include_path=str(tasks), include_defaults=False)
    found = lm_eval.simple_evaluate(model, tasks=list(TASKS), task_manager=manager)
    figures = figures_of(found["results"])
    assert len(figures) == 6
    return figures


def _refused(world: DistEnv, folder: str, flags: list[str]) -> str:
    with pytest.raises(ConfigError) as caught:
        make_trainer(world, folder, *SHORT, *flags)
    return str(caught.value)


LAYOUTS = {
    "context": ("cp 2", 2, ["--experimental.context_parallel_degree=2"]),
    "pipeline of two ranks each": (
        "tp 2",
        4,
        [
            "--experimental.pipeline_parallel_degree=2",
            "--training.tensor_parallel_degree=2",
            "--experimental.pipeline_parallel_schedule=Interleaved1F1B",
            "--model.overrides.n_layers=4",
            "--training.loss_chunks=2",
        ],
    ),
    "experts": (
        "2 ranks divide the experts",
        2,
        [
            "--model.name=mixtral",
            "--model.overrides.n_kv_heads=2",
            "--model.overrides.ffn_dim=64",
            "--parallelism.expert_parallel_degree=2",
        ],
    ),
    "averaged weights": ("dp_shard 2", 2, ["--optimizer.ema_decay=0.5", "--eval.ema"]),
}


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_figures_are_those_of_the_command_in_every_layout(pool, tmp_path, tasks, layout):
    mesh, ranks, flags = LAYOUTS[layout]
    words = [*SHORT, *flags_of(tasks), *flags]
    found = pool(ranks).run(quickly, train_run, str(tmp_path / "run"), *words)[0]
    assert any("mesh" in line and mesh in line for line in found["said"])
    scores = scores_of(found["rows"])
    averaged = ("--ema",) if layout == "averaged weights" else ()
    checkpoint = tmp_path / "run" / "checkpoint" / "step-4"
    expected = evaluated(checkpoint, tasks, flags=averaged)
    assert scores[4].keys() == expected.keys()
    for name, value in expected.items():
        exact = name.endswith(("acc", "acc_norm"))
        assert scores[4][name] == (value if exact else pytest.approx(value, rel=1e-6)), name
    if averaged:
        assert scores[4] != evaluated(checkpoint, tasks)


@pytest.mark.slow
def test_a_task_that_fails_is_told_and_ends_nothing(pool, tmp_path, tasks):
    """Rank 0 alone runs the code that fails, after a pass of all ranks."""
    bare = pool(2).run(train_run, str(tmp_path / "bare"), *SHORT)[0]
    words = [*SHORT, *flags_of(tasks, "tiny_broken", "tiny_group")]
    first, second = pool(2).run(quickly, train_run, str(tmp_path / "run"), *words)
    assert (first["code"], second["code"]) == (0, 0)
    assert losses_of(first["rows"]) == losses_of(bare["rows"])
    group = {step: list(figures) for step, figures in scores_of(first["rows"]).items()}
    assert group == dict.fromkeys((2, 4), ["eval/tiny_group/acc"])
    told = [line.partition(": ")[2] for line in first["said"] if "continues without" in line]
    failed = "the task tiny_broken failed, training continues without it: KeyError: 'gold'"
    assert told == [failed] * 2


def _stopped_run(
    world: DistEnv, folder: str, step: int, trains: bool, *flags: str
) -> dict[str, Any]:
    """The last rank is asked to stop in the evaluation of a step, or while it trains in it."""
    trainer = make_trainer(world, folder, *SHORT, *flags)

    def strike(model: Any, given: Any) -> None:
        is_here = model.training == trains and trainer.step == step
        if is_here and world.rank == world.size - 1:
            trainer.stop.request("a test")

    trainer.parts.model.register_forward_pre_hook(strike)
    return outcome_of(trainer, folder)


@pytest.fixture(scope="module")
def whole(pool: Pools, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A run with tasks that nothing stops."""
    folder = tmp_path_factory.mktemp("whole")
    flags = flags_of(write_tasks(folder))
    found: dict[str, Any] = pool(2).run(quickly, train_run, str(folder / "run"), *SHORT, *flags)[0]
    return found


@pytest.mark.slow
@pytest.mark.parametrize(("step", "trains"), [(4, False), (1, True)])
def test_a_stop_leaves_the_tasks_to_the_resumed_run_which_runs_them(
    pool, tmp_path, tasks, whole, step, trains
):
    flags = flags_of(tasks)
    folder = str(tmp_path / "run")
    stopped = pool(2).run(quickly, _stopped_run, folder, step, trains, *flags)[0]
    assert stopped["code"] == exit_codes.PREEMPTED
    assert sorted(scores_of(stopped["rows"])) == ([2] if step == 4 else [])
    assert any("were interrupted" in line for line in stopped["said"]) is not trains
    # Ranks learn of a stop in a step with the next one.
    assert stopped["step"] == (2 if trains else step)
    resumed = pool(2).run(quickly, train_run, folder, *SHORT, *flags)[0]
    assert scores_of(resumed["rows"]) == scores_of(whole["rows"])
    assert losses_of(resumed["rows"]) == losses_of(whole["rows"])
    again = pool(2).run(quickly, train_run, folder, *SHORT, *flags)[0]
    assert scores_of(again["rows"]) == scores_of(resumed["rows"])
    # The checkpoint of the last step owed them, until the resumed run had run them.
    assert not any("tasks at" in line for line in again["said"])
    assert any("nothing to do" in line for line in again["said"])


@pytest.mark.slow
def test_tensorboard_has_the_figures_and_speed_does_not_count_them(pool, tmp_path, tasks):
    flags = [*flags_of(tasks, freq=3), "--no-eval.at_end", "--metrics.enable_tensorboard"]
    found = pool(2).run(quickly, _slow_run, str(tmp_path / "run"), *flags)[0]
    (scores,) = scores_of(found["rows"]).values()
    (board,) = (tmp_path / "run" / "tb").iterdir()
    shown = scalars(board)
    assert {name: shown[name][0] for name in scores} == {
        name: (3, pytest.approx(value)) for name, value in scores.items()
    }
    assert not [name for name in shown if "eval_seconds" in name]
    (row,) = [row for row in found["rows"] if row["step"] == 4 and "loss" in row]
    (seconds,) = [row["eval_seconds"] for row in found["rows"] if "eval_seconds" in row]
    assert seconds > 3 > row["seconds_per_step"]


def _slow_run(world: DistEnv, folder: str, *flags: str) -> dict[str, Any]:
    trainer = make_trainer(world, folder, *SHORT, *flags)
    running = task_run(trainer)
    measure = running._measure
    running._measure = lambda trainer: (time.sleep(3), measure(trainer))[1]
    return outcome_of(trainer, folder)


@pytest.mark.slow
def test_the_example_of_the_page_runs(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    page = (ROOT / "docs" / "evaluation.md").read_text()
    (section,) = re.findall(r"^```toml\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    lines = re.findall(r"^```json\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    files = re.findall(r"^```yaml\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    (tmp_path / "tasks").mkdir()
    for name, text, yaml in zip(("quiz", "held-out"), lines, files, strict=True):
        (tmp_path / "tasks" / f"{name}.jsonl").write_text(text)
        (tmp_path / "tasks" / f"{name}.yaml").write_text(yaml)
    config = tmp_path / "run.toml"
    config.write_text(f"[job]\nextends = ['{ROOT}/train_configs/debug_model.toml']\n\n{section}")
    words = [f"--job.config_file={config}", *TWENTY_STEPS, "--training.steps=12"]
    done = python(ROOT / "train.py", *words, f"--job.dump_folder={tmp_path}/run", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    scores = scores_of(read_metrics(tmp_path / "run" / "metrics.jsonl"))
    assert sorted(scores) == [10, 12]
    assert sorted(scores[12]) == [
        "eval/held-out/bits_per_byte",
        "eval/quiz/acc",
        "eval/quiz/acc_norm",
    ]
    assert f"bits_per_byte  {scores[12]['eval/held-out/bits_per_byte']:.4f}" in done.stdout
    shown = _as_json(read_run(tmp_path / "run"))["tasks"]
    assert {f"eval/{name}": value for name, value in shown.items()} == scores[12]


# Refusals


@pytest.mark.slow
def test_what_cannot_be_run_is_refused_at_the_start(pool, tmp_path, tasks):
    folder = str(tmp_path / "run")
    (said,) = pool(1).run(quickly, _refused, folder, flags_of(tasks, "tiny_choice", "no_such_task"))
    assert "eval.tasks: the harness has no task 'no_such_task'" in said
    (tasks / "texts.jsonl").rename(tasks / "moved.jsonl")
    (said,) = pool(1).run(quickly, _refused, folder, flags_of(tasks, "tiny_rolling"))
    assert "eval.tasks: the task tiny_rolling cannot be loaded: FileNotFoundError" in said
    assert "without a network its data must be in the cache" in said
    (tasks / "moved.jsonl").rename(tasks / "texts.jsonl")
    (said,) = pool(1).run(quickly, _refused, folder, flags_of(tasks, "tiny_until"))
    assert "the task tiny_until continues texts" in said
    assert "`titanlite export`, and `lm_eval --model vllm`" in said
    (said,) = pool(1).run(quickly, _refused, folder, flags_of(tasks / "none", "tiny_choice"))
    assert "eval.include_path: there is no folder" in said


def test_a_folder_of_task_files_that_a_kept_config_names_is_code():
    (claim,) = config_claims("a.toml:3", "eval.include_path", "tasks", "tasks")
    assert claim.effect.startswith("runs functions that task files below /")
