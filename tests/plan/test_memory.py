"""Memory by formula, against peaks that `titanlite.tools.plan_trace` found."""

import pytest

from titanlite.fit import check_config
from titanlite.plan.memory import NoFormula, estimate, worst_rank
from titanlite.plan.parts import GIB

BLOCKS_6 = ("--model.overrides.n_layers=6", "--training.global_batch_size=8", "--training.loss_chunks=8")


def read(config: str, ranks: int, *flags: str):
    return check_config([f"--job.config_file=train_configs/{config}.toml", *flags], ranks, training=False)[1]


def plan(config: str, ranks: int, *flags: str):
    return estimate(read(config, ranks, *flags))


WHOLE_STEP = "--training.global_batch_size=-1"
PIPELINE = (WHOLE_STEP, "--experimental.pipeline_parallel_degree=4", "--training.gradient_sync=last")


@pytest.mark.parametrize(
    ("traced", "ranks", "flags"),
    [
        (15.901, 8, [*BLOCKS_6, "--activation_checkpoint.mode=none"]),
        (9.895, 8, [*BLOCKS_6, "--activation_checkpoint.mode=full"]),
        (12.432, 8, [*BLOCKS_6, "--activation_checkpoint.selective_ac_option=op"]),
        (12.898, 8, [*BLOCKS_6, "--activation_checkpoint.selective_ac_option=2"]),
        (53.58, 8, [WHOLE_STEP, "--training.reshard_after_forward=never"]),
        (40.01, 64, [WHOLE_STEP, "--training.data_parallel_replicate_degree=8"]),
        (123.58, 8, [WHOLE_STEP, "--training.data_parallel_type=ddp"]),
        (27.67, 8, [WHOLE_STEP, "--training.tensor_parallel_degree=2"]),
        (69.92, 8, ["--training.gradient_sync=last", "--training.global_batch_size=16"]),
    ],
)
def test_the_peak_is_that_of_the_trace(traced, ranks, flags):
    assert plan("llama3_8b", ranks, *flags).peak.total / GIB == pytest.approx(traced, rel=0.01)


def test_offload_moves_bytes_to_the_host():
    device = plan("llama3_8b", 8)
    weights = plan("llama3_8b", 8, "--training.enable_cpu_offload")
    assert weights.host["parameters"] + weights.host["optimizer"] == 3 * 4 * 8_030_261_248 / 8
    assert device.peak.total - weights.peak.total >= weights.host["parameters"] + weights.host["optimizer"]
    full = "--activation_checkpoint.mode=full"
    activations = plan("llama3_8b", 8, full, "--activation_checkpoint.offload")
    assert activations.host["activations"] == 32 * 8192 * 4096 * 2  # the inputs of blocks
    moved = plan("llama3_8b", 8, full).peak.total - activations.peak.total
    assert moved == activations.host["activations"]


def test_the_worst_pipeline_rank_has_the_logits():
    run = read("llama3_8b", 32, *PIPELINE, "--training.batch_size=8", "--activation_checkpoint.mode=full")
    assert worst_rank(run) == 24
    assert estimate(run).peak.total > estimate(run, rank=0).peak.total


def test_a_group_by_class_has_no_formula():
    with pytest.raises(NoFormula, match="fsdp_units"):
        plan("llama3_8b", 8, '--training.fsdp_units=["Attention"]')
