"""Memory by formula, against peaks that `titanlite.cli.plan.memory_trace` found."""

import pytest

from tests.support.run_of import run_from
from titanlite.plan.memory import NoFormula, estimate
from titanlite.plan.parts import GIB

BLOCKS_6 = "--model.overrides.n_layers=6 --training.global_batch_size=8 --training.loss_chunks=8"
OPTION = "--activation_checkpoint.selective_ac_option"


def plan(config: str, ranks: int, *flags: str):
    return estimate(run_from(f"{config}.toml", ranks, *flags))


WHOLE_STEP = "--training.global_batch_size=-1"
PIPELINE = (
    WHOLE_STEP,
    "--experimental.pipeline_parallel_degree=4",
    "--training.gradient_sync=last",
)


#: More ranks share the products than the weights.
WAITS = (
    "--training.tensor_parallel_degree=4 --training.gradient_sync=last "
    "--training.global_batch_size=4"
)


AC = "--activation_checkpoint.mode="
FULL_4 = f"{AC}full --model.overrides.n_layers=4"
CHUNKS = "--training.loss_chunks=8"
TP = "--training.tensor_parallel_degree=2"
LAST = "--training.gradient_sync=last"


@pytest.mark.parametrize(
    ("traced", "within", "config", "ranks", "flags"),
    [
        (12.8983, 0.01, "llama3_1_8b", 8, f"{BLOCKS_6} {OPTION}=2"),
        # The gradient of the whole table in the backward of a divided embedding.
        (
            6.783,
            0.002,
            "llama3_1_405b",
            512,
            f"{AC}full --model.overrides.n_layers=3 --training.tensor_parallel_degree=8 {CHUNKS}",
        ),
        (2.526, 0.002, "llama3_2_1b", 8, f"{FULL_4} {TP} {CHUNKS}"),
        (16.24, 0.002, "llama3_1_8b", 8, f"{FULL_4} {TP} --training.enable_loss_parallel=false"),
        # The same gradient waits for the last micro-batch, as wide as on one rank.
        (13.785, 0.002, "llama3_1_8b", 4, f"{FULL_4} {TP} {LAST} --training.global_batch_size=4"),
        # There the first micro-batch holds it in both dtypes, or the last one beside its own.
        (6.925, 0.002, "llama3_1_8b", 8, f"{FULL_4} {WAITS} --training.seq_len=1024"),
        (
            5.925,
            0.002,
            "llama3_1_8b",
            8,
            f"{FULL_4} {WAITS} --training.seq_len=2048 --model.overrides.n_layers=2",
        ),
        (
            10.952,
            0.002,
            "llama3_1_8b",
            8,
            f"{FULL_4} {CHUNKS} --training.reshard_after_forward=2",
        ),
        # Real sizes.
        (
            40.01,
            0.02,
            "llama3_1_8b",
            64,
            f"{WHOLE_STEP} --training.data_parallel_replicate_degree=8",
        ),
        (123.58, 0.02, "llama3_1_8b", 8, f"{WHOLE_STEP} --training.data_parallel_type=ddp"),
        (69.92, 0.02, "llama3_1_8b", 8, f"{LAST} --training.global_batch_size=16"),
    ],
)
def test_the_peak_is_that_of_a_trace(traced, within, config, ranks, flags):
    found = plan(config, ranks, *flags.split()).peak.total / GIB
    assert found == pytest.approx(traced, rel=within)


def test_every_rank_of_expert_parallelism_has_its_experts():
    flags = ("--model.overrides.n_layers=3", "--parallelism.expert_parallel_degree=4")
    run = run_from("mixtral_8x7b.toml", 16, *flags)
    first, last = (estimate(run, rank).peak.parts["optimizer"] for rank in (0, 15))
    assert last == pytest.approx(first, rel=1e-3)  # the router has fewer rows than ranks


def test_offload_moves_bytes_to_the_host():
    device = plan("llama3_1_8b", 8)
    weights = plan("llama3_1_8b", 8, "--training.enable_cpu_offload")
    assert weights.host["parameters"] + weights.host["optimizer"] == 3 * 4 * 8_030_261_248 / 8
    assert (
        device.peak.total - weights.peak.total
        >= weights.host["parameters"] + weights.host["optimizer"]
    )
    full = "--activation_checkpoint.mode=full"
    activations = plan("llama3_1_8b", 8, full, "--activation_checkpoint.offload")
    assert activations.host["activations"] == 32 * 8192 * 4096 * 2  # the inputs of blocks
    moved = plan("llama3_1_8b", 8, full).peak.total - activations.peak.total
    assert moved == activations.host["activations"] * 30 / 32  # two are on their way


def test_the_worst_pipeline_rank_has_the_logits():
    flags = (*PIPELINE, "--training.batch_size=8", f"{AC}full")
    run = run_from("llama3_1_8b.toml", 32, *flags)
    assert estimate(run).rank == 24
    assert estimate(run).peak.total > estimate(run, rank=0).peak.total


def test_groups_by_class_and_split_backwards_have_no_formula():
    with pytest.raises(NoFormula, match="fsdp_units"):
        plan("llama3_1_8b", 8, '--training.fsdp_units=["Attention"]')
    schedule = "--experimental.pipeline_parallel_schedule=ZBVZeroBubble"
    with pytest.raises(NoFormula, match="the schedule ZBVZeroBubble"):
        flags = ("--training.batch_size=8", "--activation_checkpoint.mode=none")
        plan("llama3_1_8b", 32, *PIPELINE, *flags, schedule)
