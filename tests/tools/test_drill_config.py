"""The tiny copy of a config: the features that it keeps, and the flags that it refuses."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from titanlite.config.errors import ConfigError
from titanlite.tools import drill_config
from titanlite.tools.drill_config import TinyConfig

ROOT = Path(__file__).resolve().parents[2]


def tiny_config(config: str, *flags: str, ranks: int | None = None, compiled: bool = False) -> TinyConfig:
    return drill_config.tiny_config(config, flags, ranks, compiled)


@pytest.mark.parametrize("file", sorted(path.name for path in (ROOT / "train_configs").glob("*.toml")))
def test_every_shipped_config_has_a_tiny_copy(file: str) -> None:
    d = tiny_config(file).config
    assert (d.model.overrides["dim"], d.model.overrides["n_layers"], d.model.vocab_size) == (64, 2, 4096)
    assert d.checkpoint.enable_checkpoint and d.checkpoint.interval == 2 and d.training.steps == 8
    assert not d.training.compile and not d.metrics.enable_tensorboard and d.validation.enable


#: Ranks -> degrees: tensor, pipeline, replicate; what is lost.
DEGREES = [
    (None, (2, 2, 1), "data_parallel_shard 1", "data_parallel_replicate"),
    (8, (2, 2, 2), "data_parallel_shard 1", ""),
    (2, (2, 1, 1), "data_parallel_shard 1", "pipeline_parallel, data_parallel_replicate"),
    (3, (1, 1, 1), "data_parallel_shard 3", "tensor_parallel, pipeline_parallel, data_parallel_replicate"),
]


@pytest.mark.parametrize(("ranks", "degrees", "shard", "lost"), DEGREES)
def test_parallelism_is_kept_at_degree_two_as_far_as_the_ranks_suffice(
    ranks: int | None, degrees: tuple[int, int, int], shard: str, lost: str
) -> None:
    flags = ["--training.tensor_parallel_degree=8", "--experimental.pipeline_parallel_degree=4"]
    flags += ["--training.data_parallel_replicate_degree=2", "--training.gradient_sync=last"]
    tiny = tiny_config("llama3_8b.toml", *flags, ranks=ranks)
    d = tiny.config
    found = d.training.tensor_parallel_degree, d.experimental.pipeline_parallel_degree
    assert (*found, d.training.data_parallel_replicate_degree) == degrees
    assert tiny.ranks == (ranks or 4) and tiny.notes[1].endswith(shard)
    assert (f"not tested on {tiny.ranks} ranks: {lost}" in tiny.notes) == bool(lost)
    assert ranks != 3 or d.training.global_batch_size == 6


def test_features_stay() -> None:
    flags = ["--checkpoint.async_mode=async", "--activation_checkpoint.mode=full", "--optimizer.name=Adam"]
    flags += ["--training.gradient_sync=every", "--float8.enable_float8_linear", "--guard.policy=rollback"]
    flags += ["--checkpoint.milestones=[1, 5]", "--training.loss_chunks=500", "--no-validation.enable"]
    flags += ["--float8.filter_fqns=attention.wk,w2,layers.30.,auto_filter_small_kn"]
    tiny = tiny_config("llama3_8b.toml", *flags)
    d = tiny.config
    assert d.checkpoint.async_mode == "async" and d.activation_checkpoint.mode == "full"
    assert d.optimizer.name == "Adam" and d.guard.policy == "rollback" and d.training.gradient_sync == "every"
    assert d.float8.enable_float8_linear and d.float8.emulate and d.float8.filter_fqns == ["attention.wk", "w2"]
    assert d.training.mixed_precision_param == "bfloat16"
    # Values that would not work, or would change the scenarios.
    assert d.checkpoint.milestones == [] and d.training.loss_chunks == 2
    assert d.validation.enable
    heads = [tiny_config(file).config.model.overrides["n_kv_heads"] for file in ("llama3_8b.toml", "llama2_7b.toml")]
    assert heads == [2, 4], "of 4 heads: grouped ones stay grouped"


def test_compile_stays_only_with_the_flag() -> None:
    flags = ["--training.compile", "--activation_checkpoint.mode=budget"]
    off, on = (tiny_config("debug_model.toml", *flags, compiled=compiled).config for compiled in (False, True))
    assert (off.training.compile, off.activation_checkpoint.mode) == (False, "full")
    assert (on.training.compile, on.activation_checkpoint.mode) == (True, "budget")


def test_it_writes_only_in_its_own_folder(tmp_path: Path) -> None:
    own = tmp_path / "mine.toml"
    own.write_text(
        f'[job]\nsave_config_file = "{tmp_path}/saved.toml"\n[checkpoint]\nfolder = "{tmp_path}/precious"\n'
        "keep_latest_k = 1\n[metrics]\nenable_tensorboard = true\n[profiling]\nenable_profiling = true\n"
    )
    d = tiny_config(str(own)).config
    assert d.checkpoint.folder == "checkpoint" and d.checkpoint.keep_latest_k == 3
    assert d.job.save_config_file is None and not d.metrics.enable_tensorboard and not d.profiling.enable_profiling
    assert str(tmp_path) not in re.sub(r"config_file='[^']*'", "", repr(d))


@pytest.mark.parametrize("flag", ["--training.seq_len=64", "--job.dump_folder=here", "--training.epochs=2"])
def test_flags_of_keys_that_the_drill_sets_are_refused(flag: str) -> None:
    with pytest.raises(ConfigError) as caught:
        tiny_config("debug_model.toml", flag)
    assert [problem.key for problem in caught.value.problems] == [flag[2:].partition("=")[0]]
