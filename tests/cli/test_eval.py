"""`titanlite eval` gives the losses that the run itself has logged, and leaves the run as it
is.
"""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.commands import evaluate_run
from tests.support.hf import hf_folder
from tests.support.pool import Pools
from tests.support.processes import python, titanlite
from tests.support.task_files import TASKS, without_shipped_tasks, write_tasks
from tests.support.texts import write_texts
from tests.support.whole_runs import train_run
from titanlite import doors, exit_codes
from titanlite.checkpoint.manifest import CheckpointError, read_manifest
from titanlite.cli.checkpoint_folders import checkpoint_of
from titanlite.cli.eval_losses import config_of, read_texts
from titanlite.cli.main import main
from titanlite.config.errors import ConfigError
from titanlite.data.tokenizer import BUNDLED_SENTENCEPIECE
from titanlite.validation import ValidationResult


def _train(pool: Pools, folder: Path, *flags: str) -> dict[str, Any]:
    """Two steps on two ranks, on a text that is gone afterwards; return the row of the last
    validation.
    """
    text = write_texts(
        folder / "text.jsonl",
        [f"{n} and {n + 1} are numbers, and so on to {n + 9}" for n in range(60)],
    )
    own = [
        "--validation.sources=[{name='c4_test'}, {name='c4_validation'}]",
        "--validation.enable",
        "--training.steps=2",
        f"--training.dataset_path={text}",
        "--optimizer.lr=0.1",
    ]
    rows = pool(2).run(train_run, str(folder / "run"), *own, *flags)[0]["rows"]
    text.unlink()
    return next(row for row in reversed(rows) if "validation_loss" in row)


def _contents(folder: Path) -> dict[str, tuple[int, int]]:
    return {str(path): (path.stat().st_mtime_ns, path.stat().st_size) for path in folder.rglob("*")}


@pytest.fixture(scope="module")
def trained(pool: Pools, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("trained")
    return folder / "run", _train(pool, folder)


def _equal(result: ValidationResult, row: dict[str, Any]) -> bool:
    found = {f"validation/{name}/loss": one.loss for name, one in result.sources.items()}
    found |= {"validation_loss": result.all.loss, "validation_tokens": result.all.tokens}
    return len(found) == 4 and all(row[key] == value for key, value in found.items())


def test_it_equals_the_figures_of_the_run_to_the_last_bit(pool, trained):
    folder, row = trained
    before = _contents(folder)
    assert all(_equal(result, row) for result in pool(2).run(evaluate_run, folder))
    assert _contents(folder) == before


@pytest.mark.slow
def test_tensor_parallel_ranks_measure_what_their_run_has_logged(pool, tmp_path):
    row = _train(pool, tmp_path, "--training.tensor_parallel_degree=2")
    assert all(_equal(result, row) for result in pool(2).run(evaluate_run, tmp_path / "run"))


@pytest.mark.slow
def test_ranks_of_torchrun_measure_together_and_one_prints_a_json_object(trained, tmp_path):
    folder, row = trained
    words = ["-m", "titanlite.torchrun", "--nproc_per_node=2", "--standalone", "-m", "titanlite"]
    done = python(*words, "eval", folder / "checkpoint" / "step-2", "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert (found["step"], found["ranks"]) == (2, 2)
    assert (found["loss"], found["tokens"]) == (row["validation_loss"], row["validation_tokens"])
    assert set(found["sources"]) == {"c4_test", "c4_validation"}


def test_the_command_prints_a_table(trained, tmp_path):
    done = titanlite("eval", trained[0], "--validation.batch_size=8", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    title, head, *rows = done.stdout.splitlines()
    assert title.endswith("step-2")
    assert head.split() == ["text", "loss", "perplexity", "tokens"]
    assert [line.split()[0] for line in rows] == ["c4_test", "c4_validation", "all"]
    # Twice the batch on half the ranks.
    assert rows[-1].split()[1] == f"{trained[1]['validation_loss']:.4f}"


KEPT = """
float8.drift_check = 5
training.fsdp_units = 'size'
training.fsdp_min_params = 9
data.log_documents = true
validation.parts = 4
sample.freq = 2
optimizer.name = 'AdamW8bit'
metrics.colour = 'red'
launch.system = 'sagemaker'
stall.deadline_seconds = 'a day'
lr_scheduler.min_lr = 9
eval.include_path = 'tasks'
checkpoint.hub = 'ada/tiny'
checkpoint.local_folder = '/nvme'
"""


def test_a_kept_config_of_another_version_is_evaluated_with_one_warning(
    tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr(doors, "lack", lambda place: "is not here" if "contrib" in place else "")
    manifest: Any = SimpleNamespace(config={"toml": KEPT})
    run = config_of(tmp_path, manifest, None, [], 1)
    assert (run.training.fsdp_units, run.launch.system) == ("block", "")
    (line,) = capsys.readouterr().err.splitlines()
    assert set(line.rpartition(": ")[2].split(", ")) == {
        *("float8.drift_check", "training.fsdp_min_params", "data.log_documents", "sample.freq"),
        *("launch.system", "stall.deadline_seconds", "validation.parts", "optimizer.name"),
        "metrics.colour",
    }


@pytest.mark.parametrize(
    ("toml", "flags", "wrong"),
    [
        ("model.norm_kind = 'a'", [], "model.norm_kind"),
        ("mup.scale = 2", [], "mup.scale"),
        ("float8.block = 32", [], "float8.block"),
        ("training.mixed_precision_param = 'float16'", [], "mixed_precision_param"),
        ("data.record = {text = 'a'}", [], "data.record"),
        ("[noise]\nscale = 1", [], "[noise]"),
        ("training.seq_len = 'a'", [], "training.seq_len"),
        ("", ["--launch.system=sagemaker"], "launch.system"),
        ("[model", [], "broken TOML"),
    ],
)
def test_what_decides_about_the_losses_and_the_users_flags_must_be_right(
    tmp_path, toml, flags, wrong
):
    manifest: Any = SimpleNamespace(config={"toml": toml})
    with pytest.raises(ConfigError, match=re.escape(wrong)):
        config_of(tmp_path, manifest, None, flags, 1)


def test_weights_of_another_tokenizer_are_refused(trained):
    step = checkpoint_of(trained[0])
    manifest = read_manifest(step)
    flags = [f"--model.tokenizer_path={BUNDLED_SENTENCEPIECE}", "--model.name=llama2"]
    run = config_of(step, manifest, None, flags, 1)
    with pytest.raises(CheckpointError, match=r"another .*tokenizer.*--checkpoint\.allow_changes="):
        read_texts(run, step, manifest)
    with pytest.raises(ConfigError, match="tensor_parallel 3"):
        config_of(step, manifest, None, ["--training.tensor_parallel_degree=3"], 1)


# Tasks of lm-evaluation-harness


needs_harness = pytest.mark.skipif(
    importlib.util.find_spec("lm_eval") is None,
    reason="lm_eval is not installed: `titanlite eval` is NOT tested",
)


@needs_harness
@pytest.mark.slow
def test_every_kind_of_request_equals_the_harness_own_backend(tmp_path, capsys, monkeypatch):
    import lm_eval
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    folder = hf_folder(tmp_path / "model")
    texts = ["The first of all", "", "Some words that go on " * 12, "Naïve – 日本", "a b c"]
    tasks = write_tasks(tmp_path, texts)
    words = ["--tasks", ",".join(TASKS), "--include-path", str(tasks), "--device=cpu", "--json"]
    with without_shipped_tasks():
        assert main(["eval", str(folder), *words, "--batch-size=2"]) == 0
    ours = json.loads(capsys.readouterr().out)["results"]
    theirs = lm_eval.simple_evaluate(
        HFLM(
            pretrained=str(folder), device="cpu", add_bos_token=True, dtype="float32", max_length=96
        ),
        tasks=list(TASKS),
        # Without the thousands of tasks that the harness ships.
        task_manager=TaskManager(include_path=str(tasks), include_defaults=False),
    )["results"]
    for name in TASKS:
        numbers = {key: value for key, value in theirs[name].items() if isinstance(value, float)}
        assert numbers and {key: ours[name][key] for key in numbers} == pytest.approx(
            numbers, rel=1e-5
        ), name
    assert main(["eval", str(folder), "--tasks=hellaswag,no_such_task"]) == exit_codes.CONFIG
    said = capsys.readouterr().err
    assert "the harness has no task 'no_such_task'" in said and "hellaswag" not in said


def test_a_missing_harness_is_named_with_its_command(capsys, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    (tmp_path / "model.safetensors").touch()
    assert main(["eval", str(tmp_path), "--tasks=x"]) == exit_codes.CONFIG
    assert "pip install 'titanlite[eval]'" in capsys.readouterr().err
