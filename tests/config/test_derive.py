"""Derived numbers: degrees, batch arithmetic, the length of the run, the schedule, folders."""

from __future__ import annotations

from dataclasses import astuple

import pytest

from titanlite.config.errors import ConfigError
from titanlite.config.load import load
from titanlite.resolve.load import check_config, resolve, smallest_world
from titanlite.run.config import RunConfig
from titanlite.run.length import with_length, with_steps

T = "--training."
E = "--experimental."
DDP = f"{T}data_parallel_type=ddp"
SAVES = "--checkpoint.enable_checkpoint"


def run_of(*flags: str, ranks: int = 1) -> RunConfig:
    return resolve(load(flags), ranks)[1]


def warnings(run: RunConfig) -> list[str]:
    return [note.text for note in run.notes if note.warns]


@pytest.mark.parametrize(
    ("flags", "ranks", "replicate", "shard"),
    [
        ([], 6, 1, 6),
        ([f"{T}data_parallel_replicate_degree=2"], 6, 2, 3),
        ([f"{T}tensor_parallel_degree=2", f"{E}context_parallel_degree=2"], 8, 1, 2),
        ([DDP], 4, 4, 1),
        ([DDP, f"{T}tensor_parallel_degree=2"], 4, 2, 1),
        ([DDP, f"{T}data_parallel_replicate_degree=4"], 4, 4, 1),
    ],
)
def test_ranks_left_over_shard_the_weights_or_copy_them(flags, ranks, replicate, shard):
    mesh = run_of(*flags, ranks=ranks).mesh
    assert (mesh.dp_replicate, mesh.dp_shard) == (replicate, shard)
    assert mesh.weight_shards == shard * mesh.context


@pytest.mark.parametrize(
    ("flags", "fewest"),
    [
        ([], 1),
        ([f"{T}tensor_parallel_degree=2", f"{E}pipeline_parallel_degree=4"], 8),
        ([f"{T}tensor_parallel_degree=2", f"{T}data_parallel_shard_degree=4"], 8),
        ([f"{T}reshard_after_forward=4"], 4),
        ([f"{T}tensor_parallel_degree=2", "--checkpoint.create_seed_checkpoint", SAVES], 1),
    ],
)
def test_smallest_world_that_fits(flags, fewest):
    assert smallest_world(load(flags)) == fewest
    assert check_config(flags, training=False)[1].mesh.world_size == fewest


def test_accumulation_follows_from_the_global_batch():
    batch = run_of(f"{T}batch_size=4", f"{T}global_batch_size=24", f"{T}seq_len=10", ranks=3).batch
    assert astuple(batch) == (4, 2, 24, 10, 240)
    assert run_of(f"{T}batch_size=4", ranks=3).batch.global_batch_size == 12


def test_tokens_become_steps_rounded_up():
    for tokens, steps in ((100, 1), (101, 2)):
        flags = [f"{T}seq_len=10", f"{T}batch_size=5", f"{T}tokens={tokens}"]
        assert run_of(*flags, ranks=2).steps == steps


def test_epochs_become_steps_once_the_text_is_counted():
    flags = [f"{T}epochs=3", f"{T}batch_size=4"]
    before = run_of(*flags)
    after = with_length(before, 30)
    assert (before.steps, before.schedule.total_steps) == (None, None)
    assert after.steps == after.schedule.total_steps == 8
    shortened = with_length(run_of(*flags, "--training.warmup_steps=9"), 30)
    assert shortened.schedule.warmup_steps == 8 and len(warnings(shortened)) == 1
    own = run_of(*flags, "--lr_scheduler.total_steps=50")
    assert with_length(own, 30).schedule == own.schedule
    skipping = with_length(run_of(*flags, "--data.skip_steps=7-20,2,2-3"), 30)
    assert skipping.steps == 4  # sequences 0-3, 12-15, 16-19, 20-23
    assert run_of(f"{T}steps=9", "--data.skip_steps=2").steps == 9


def test_schedule_is_as_long_as_the_run_unless_it_has_its_own_length():
    own = run_of(f"{T}steps=50", "--lr_scheduler.total_steps=5000")
    assert (own.steps, warnings(own)) == (50, [])
    assert (own.schedule.total_steps, own.schedule.warmup_steps) == (5000, 200)
    run = run_of(f"{T}steps=500")
    assert run.schedule.total_steps == 500
    longer = with_steps(run, 700)
    assert (longer.steps, longer.schedule.total_steps) == (700, 700)
    assert with_steps(own, 70).schedule == own.schedule


@pytest.mark.parametrize(
    ("flags", "field", "steps", "shortened"),
    [
        (["steps=50"], "warmup_steps", 50, "200 steps is shortened to 50"),
        (["steps=100", "decay_steps=90"], "decay_steps", 80, "90 steps is shortened to 80"),
        (
            ["steps=100", "decay_type=plateau", "plateau_ratio=0.9"],
            "plateau_steps",
            80,
            "90 steps is shortened to 80",
        ),
        (["steps=1000", "style=fsdp", "warmup_ratio=0.0125"], "warmup_steps", 12.5, ""),
        (["steps=1000", "warmup_ratio=0.0125"], "warmup_steps", 12, ""),
    ],
)
def test_parts_of_the_schedule_are_shortened_to_it_with_a_warning(flags, field, steps, shortened):
    given = [
        f"--{'training' if flag.startswith('steps') else 'lr_scheduler'}.{flag}" for flag in flags
    ]
    if steps < 100 and field != "warmup_steps":
        given.append(f"{T}warmup_steps=20")
    run = run_of(*given)
    assert getattr(run.schedule, field) == steps
    assert run.schedule.decay_type == "linear"
    assert [shortened in warning for warning in warnings(run)] == ([True] if shortened else [])


def test_folders_are_below_the_dump_folder_unless_absolute():
    flags = [
        "--job.dump_folder=out",
        "--job.save_config_file=c.toml",
        "--profiling.save_traces_folder=/p",
    ]
    run = run_of(*flags)
    assert (run.checkpoint.folder, run.metrics.save_tb_folder) == ("out/checkpoint", "out/tb")
    assert (run.job.save_config_file, run.profiling.save_traces_folder) == ("out/c.toml", "/p")
    assert run_of(*flags, "--checkpoint.folder=s3://b/c").checkpoint.folder == "s3://b/c"
    assert 'folder = "checkpoint"' in run_of(*flags).toml, "as it was written"


def test_sections_are_filled_from_others():
    run = run_of(f"{T}batch_size=4", f"{T}seq_len=64", "--validation.seq_len=128")
    assert (run.validation.batch_size, run.validation.seq_len, run.max_seq_len) == (4, 128, 64)
    assert run_of("--validation.enable", "--validation.seq_len=4096").max_seq_len == 4096
    assert run_of("--model.overrides.n_layers=1").activation_checkpoint.mode == "selective", (
        "a default that fits none"
    )


def test_a_pipeline_keeps_weights_gathered_and_knows_its_stages():
    flags = [f"{E}pipeline_parallel_degree=2", f"{E}pipeline_parallel_schedule=interleaved1f1b"]
    run = run_of(*flags, ranks=4)
    assert (run.pipeline.stages, run.pipeline.microbatches) == (4, 2)
    assert run.experimental.pipeline_parallel_schedule == "Interleaved1F1B"
    assert run.experimental.pipeline_parallel_microbatches == 2
    assert run.training.reshard_after_forward == "never"
    assert any("stay gathered" in note.text for note in run.notes)
    (warning,) = warnings(run_of(*flags, f"{T}reshard_after_forward=always", ranks=4))
    assert "training.reshard_after_forward" in warning


@pytest.mark.parametrize(
    ("flags", "ranks", "warning", "mended"),
    [
        ([f"{T}prefetch=2", DDP], 4, "training.prefetch = 2 has no effect", f"{T}prefetch=0"),
        (
            [
                f"{T}tensor_parallel_degree=2",
                f"{T}compile",
                f"{T}batch_size=1",
                f"{E}enable_async_tensor_parallel",
            ],
            2,
            "overlaps no all-gather at training.batch_size = 1",
            f"{T}batch_size=2",
        ),
        (["--float8.emulate"], 1, "are ignored: float8.emulate", "--float8.emulate=false"),
    ],
)
def test_what_has_no_effect_is_a_warning(flags, ranks, warning, mended):
    (found,) = warnings(run_of(*flags, ranks=ranks))
    assert warning in found
    assert not warnings(run_of(*flags, mended, ranks=ranks))


def test_a_wrong_model_name_beside_float8_filters_is_a_problem_of_the_config():
    """The warning about filters asks the model for names, and must leave its errors to the
    checks.
    """
    flags = ["--float8.enable_float8_linear", "--float8.filter_fqns=layers.1"]
    with pytest.raises(ConfigError, match=r"1 problem in the config:\n.*model.name: .*nosuch"):
        run_of("--model.name=./nosuch.py:SPEC", *flags)
