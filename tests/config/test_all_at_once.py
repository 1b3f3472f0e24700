"""Every check is made before anything is reported, and nothing is reported that only follows from something else."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from titanlite.config.errors import ConfigError
from titanlite.prepare import checked_plans, load_plans


def wrong_keys(*flags: str, world_size: int | None = 1, training: bool = True) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        checked_plans(flags, world_size, training=training)
    return [problem.key for problem in caught.value.problems]


def in_file(tmp_path: Path, text: str) -> str:
    (tmp_path / "run.toml").write_text(text)
    return f"--job.config_file={tmp_path / 'run.toml'}"


def test_keys_that_are_wrong_by_themselves_come_first():
    flags = ["--training.setps", "3", "--optimizer.lr=x", "--model.flavor", "debugmodle", "--checkpoint.start=resume"]
    assert wrong_keys(*flags) == ["training.setps", "optimizer.lr"]
    assert set(wrong_keys(*flags[3:])) == {"model.flavor", "checkpoint.start"}


def test_unbuilt_feature_does_not_hide_a_missing_file():
    flags = ["--experimental.enable_compiled_autograd", "--model.tokenizer_path", "/nope"]
    assert wrong_keys(*flags) == ["experimental.enable_compiled_autograd", "model.tokenizer_path"]
    assert checked_plans(flags, 1, training=False)[1].tokenizer.path == "/nope"


def test_all_missing_files_are_named():
    flags = ["--model.tokenizer_path=/a", "--training.dataset_path=/b", "--validation.dataset_path=/c"]
    assert wrong_keys(*flags) == ["model.tokenizer_path", "training.dataset_path"]
    assert wrong_keys(*flags, "--validation.enable")[2:] == ["validation.dataset_path"]


def test_what_a_run_starts_from_must_be_there_until_it_has_a_checkpoint(tmp_path):
    flags = ["--checkpoint.enable_checkpoint", "--checkpoint.initial_load_path=/a", f"--job.dump_folder={tmp_path}"]
    assert wrong_keys(*flags) == ["checkpoint.initial_load_path"]
    (tmp_path / "checkpoint" / "step-3").mkdir(parents=True)
    assert checked_plans(flags, 1, training=True)[1].checkpoint.initial_load_path == "/a"


@pytest.mark.parametrize(
    ("model", "key"),
    [
        ("--model.name=lama3", "model.name"),
        ("--model.flavor=8b", "model.flavor"),
        ("--model.overrides.n_layers=1.5", "model.overrides.n_layers"),
        ("--model.overrides.multiple_of=0", "model"),
        ("--model.overrides.ffn_dim_multiplier=inf", "model.overrides.ffn_dim_multiplier"),
    ],
)
@pytest.mark.parametrize(
    "other",
    [
        "--experimental.pipeline_parallel_degree=2",
        "--training.tensor_parallel_degree=2",
        "--experimental.context_parallel_degree=2",
        "--float8.enable_float8_linear",
    ],
)
def test_a_wrong_model_is_one_problem_whatever_divides_it(model, key, other):
    for training in (False, True):
        assert wrong_keys(model, other, world_size=None, training=training) == [key]


FOUR_STAGES = """\
[training]
dataset_path = "/nope"
[experimental]
enable_compiled_autograd = true
[model]
flavor = "debugmodle"
[checkpoint]
start = "resume"
"""


def test_one_mistake_of_each_kind_is_one_report(tmp_path):
    flag = in_file(tmp_path, FOUR_STAGES)
    autograd = "experimental.enable_compiled_autograd"
    expected = ["training.dataset_path", autograd, "model.flavor", "checkpoint.start"]
    assert wrong_keys(flag) == expected
    with pytest.raises(ConfigError) as caught:
        load_plans(str(tmp_path / "run.toml"), 1)
    assert [p.where.rpartition(":")[2] for p in caught.value.problems] == ["2", "4", "6", "8"]
    assert wrong_keys(flag, training=False) == ["model.flavor", "checkpoint.start"]


def test_numbers_of_ranks_batch_and_model_are_checked_together():
    flags = ["--training.global_batch_size=12", "--training.reshard_after_forward=3", "--model.overrides.n_heads=7"]
    assert set(wrong_keys(*flags, world_size=2)) == {
        "training.global_batch_size",
        "training.reshard_after_forward",
        "model",
    }
    flags = ["--training.data_parallel_shard_degree=3", "--model.overrides.n_heads=7", "--model.overrides.dimm=7"]
    assert set(wrong_keys(*flags, world_size=2)) == {"training.data_parallel_shard_degree", "model.overrides.dimm"}


@pytest.mark.parametrize(
    ("flags", "reported"),
    [
        # A batch size that is not known makes no statement about the global batch.
        (["--training.batch_size=four", "--training.global_batch_size=12"], "training.batch_size"),
        (["--training.batch_sise=4", "--training.global_batch_size=12"], "training.batch_sise"),
        (["--training.local_batch_size=0", "--training.global_batch_size=12"], None),
        (["--training.batch_size", "--training.global_batch_size=12"], "--training.batch_size"),
        # Degrees that do not fit the ranks make none about the ranks that read data.
        (["--training.data_parallel_shard_degree=4", "--training.global_batch_size=12"], None),
        (["--training.data_parallel_shard_degree=x", "--training.tensor_parallel_degree=4"], None),
        (["--training.data_parallel_shard_degree=4", "--training.reshard_after_forward=3"], None),
        (["--training.data_parallel_type=ddp", "--training.data_parallel_shard_degree=3"], None),
        # A family that is not known has no flavors, and a wrong argument makes no decoder.
        (["--model.name=lama3", "--model.flavor=9B"], "model.name"),
        (["--model.overrides.dim=x", "--model.overrides.n_heads=7"], "model.overrides.dim"),
        (["--optimizer.lr=x", "--lr_scheduler.min_lr=0.5"], "optimizer.lr"),
        (["--debug.deterministic=x", "--debug.deterministic_warn_only"], "debug.deterministic"),
        (["--parallelism.pipeline_parallel_microbatch_size=3", "--training.batch_size=x"], "training.batch_size"),
        # What a lost file may have said is not held against the flags.
        (["--job.config_file=/nope.toml", "--training.global_batch_size=12"], "job.config_file"),
        (["--job.config_file=/nope.toml", "--model.flavor=9B"], "job.config_file"),
        (["--job.config_file", "--debug.deterministic_warn_only"], "--job.config_file"),
    ],
)
def test_consequences_of_a_reported_problem_are_not_reported(flags, reported):
    found = wrong_keys(*flags, world_size=2, training=False)
    assert len(found) == 1, found
    assert reported in (None, found[0])


def test_wrong_value_over_a_right_one_leaves_it_in_doubt(tmp_path):
    flag = in_file(tmp_path, '[training]\ndataset_path = "/nope"\nbatch_size = 3\n')
    wrong = ["--training.batch_size=x", "--training.dataset_path="]
    assert wrong_keys(flag, *wrong, "--training.global_batch_size=8") == [
        "training.batch_size",
        "training.dataset_path",
    ]


def test_right_command_line_is_planned_for_the_fewest_ranks_that_fit():
    flags: Sequence[str] = ["--training.data_parallel_shard_degree=3", "--training.steps=7"]
    config, plans = checked_plans(flags, training=True)
    assert (plans.mesh.world_size, plans.train.steps, config.sections.training.steps) == (3, 7, 7)
