"""Prompts sampled during training: every parallel layout writes the same text, and training does
not notice.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.support.pool import Pools
from tests.support.whole_runs import losses_of, make_trainer, train_run
from titanlite.config.errors import ConfigError
from titanlite.dist.dist_env import DistEnv
from titanlite.resolve.load import load_config

STEPS = ["--training.steps=4", "--checkpoint.interval=2"]
PROMPTS = [
    "--sample.prompts=['In the beginning', 'And']",
    "--sample.freq=2",
    "--sample.max_tokens=9",
]


def _both(world: DistEnv, folder: str, *flags: str) -> dict[str, Any]:
    """The figures of a run without and with samples, and those."""
    flags = "--training.steps=2", "--no-checkpoint.enable_checkpoint", *flags
    bare = train_run(world, f"{folder}/bare", *flags)
    found = train_run(world, folder, *flags, *PROMPTS, "--sample.freq=1")
    assert losses_of(bare["rows"]) == losses_of(found["rows"]), "to the last bit"
    file = Path(folder) / "samples.jsonl"
    found["samples"] = (
        [json.loads(line) for line in file.read_text().splitlines()] if world.rank == 0 else []
    )
    return found


LAYOUTS = {
    "fsdp": [],
    "tensor": ["--training.tensor_parallel_degree=2"],
    "compiled": ["--training.compile", "--compile.backend=aot_eager"],
    "context": ["--experimental.context_parallel_degree=2"],
    "replicas": [
        "--training.data_parallel_replicate_degree=2",
        "--activation_checkpoint.mode=full",
    ],
}


@pytest.fixture(scope="module")
def on_one(pool: Pools, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return pool(1).run(_both, str(tmp_path_factory.mktemp("one")))[0]


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout", [pytest.param(n, marks=[pytest.mark.slow] * (n != "fsdp")) for n in LAYOUTS]
)
def test_samples_do_not_touch_training_and_are_equal_in_every_layout(
    pool: Pools, on_one: dict[str, Any], tmp_path: Path, layout: str
) -> None:
    found = pool(2).run(_both, str(tmp_path), *LAYOUTS[layout])[0]
    rows = found["samples"]
    prompts = ("In the beginning", "And")
    assert [(row["step"], row["prompt"]) for row in rows] == [
        (s, p) for s in (1, 2) for p in prompts
    ]
    assert all(row["tokens"] == 9 or row["finish"] == "stop" for row in rows)
    assert len({row["text"] for row in rows}) > 1
    assert rows == on_one["samples"]
    assert not any("compiled" in line and "again" in line for line in found["said"]), (
        "the samples run uncompiled"
    )


@pytest.mark.slow
def test_a_resumed_run_keeps_one_sample_of_each_step_and_tensorboard_has_the_text(
    pool: Pools, tmp_path: Path
) -> None:
    pool(2).run(train_run, str(tmp_path), *STEPS, *PROMPTS)
    rows = (tmp_path / "samples.jsonl").read_text()
    shutil.rmtree(tmp_path / "checkpoint" / "step-4")
    pool(2).run(train_run, str(tmp_path), *STEPS, *PROMPTS, "--metrics.enable_tensorboard")
    assert (tmp_path / "samples.jsonl").read_text() == rows
    (board,) = (tmp_path / "tb").glob("*/events*")
    assert json.loads(rows.splitlines()[-1])["text"].encode() in board.read_bytes()


def _refused(world: DistEnv, folder: str) -> str:
    with pytest.raises(ConfigError) as caught:
        make_trainer(world, folder, *PROMPTS, "--sample.max_tokens=30")
    return str(caught.value)


def test_what_cannot_be_sampled_is_refused_before_the_model_is_built(
    pool: Pools, tmp_path: Path
) -> None:
    (said,) = pool(1).run(_refused, str(tmp_path))
    assert "sample.prompts" in said
    assert "lower sample.max_tokens" in said
    with pytest.raises(ConfigError, match=r"sample\.prompts.*pipeline_parallel_degree"):
        load_config("debug_model.toml", 2, [*PROMPTS, "--experimental.pipeline_parallel_degree=2"])
