"""GPUs, clusters and the speed of a step: units, directions, and published runs."""

from __future__ import annotations

import math
from dataclasses import replace
from unittest import mock

import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from tests.nullgpu import traffic
from tests.support.run_of import run_from
from titanlite.config.errors import ConfigError
from titanlite.features.float8 import plan_speed
from titanlite.features.float8.convert import apply_float8
from titanlite.plan import computing
from titanlite.plan.computing import (
    block_forward,
    recomputation,
    update,
)
from titanlite.plan.hardware import (
    GPUS,
    INSTANCES,
    Cluster,
    cluster_of,
    find_gpu,
    peak_flops,
    ranks_of,
)
from titanlite.plan.rates import CONSTANTS
from titanlite.plan.speed import Speed, predict
from titanlite.plan.step_sizes import StepSizes
from titanlite.plan.traffic import sharding, tensor_traffic
from titanlite.run.config import RunConfig

H100 = GPUS["h100-80g"]
#: Every share of a peak is reached in whole.
IDEAL = replace(CONSTANTS, edge=0.0, memory=1.0, link=1.0, network=1.0, contention=0.0, context=0.0)


def make(world: int, *flags: str, config: str = "llama3_1_8b") -> RunConfig:
    keys = ("training.global_batch_size=-1", "training.gradient_sync=last", *flags)
    return run_from(f"{config}.toml", world, *(f"--{key}" for key in keys))


def cluster(gpus: int, **changes: object) -> Cluster:
    return replace(Cluster(H100, min(gpus, 8), max(gpus // 8, 1), 4e11), **changes)


def of(world: int, *flags: str, config: str = "llama3_1_8b", gpu: str = "h100-80g") -> Speed:
    return predict(make(world, *flags, config=config), cluster(world, gpu=GPUS[gpu]))


FLOAT8 = ("training.compile", "float8.enable_float8_linear")
GATHER8 = (
    *FLOAT8,
    "float8.enable_fsdp_float8_all_gather",
    "float8.precompute_float8_dynamic_scale_for_fsdp",
)
OP = ("activation_checkpoint.mode=selective", "activation_checkpoint.selective_ac_option=op")
FULL = ("activation_checkpoint.mode=full",)


def tp(ranks: int) -> str:
    return f"training.tensor_parallel_degree={ranks}"


def test_gpus_are_found_by_key_by_a_part_of_it_and_by_the_name_of_the_device():
    assert find_gpu("h100-80g") is find_gpu("NVIDIA H100 80GB HBM3") is H100
    assert find_gpu("NVIDIA H200") is GPUS["h200-141g"]
    assert find_gpu("L4").key == "l4-24g"
    assert find_gpu("NVIDIA A100-SXM4-40GB").key == "a100-40g"
    assert all(find_gpu(key).key == key for key in GPUS)
    assert {one.gpu_key for one in INSTANCES.values()} <= GPUS.keys()
    assert peak_flops("NVIDIA H100 80GB HBM3 MIG 1g.10gb") is None
    with pytest.raises(ConfigError, match="nearest: h100-80g"):
        find_gpu("h100-80")
    for name, several in (
        ("h100", "h100-nvl-94g, h100-pcie-80g, h100-80g"),
        ("A100", "a100-80g, a100-40g"),
    ):
        with pytest.raises(ConfigError, match=f"{name} may be each of {several}"):
            find_gpu(name)


def test_a_cluster_is_that_of_the_command_or_of_the_launch_section():
    run = make(16, "launch.instance_type=ml.p5.48xlarge", "launch.nodes=2")
    found = cluster_of(run)
    assert (found.gpu, found.gpus_per_node, found.nodes, found.network) == (H100, 8, 2, 3200e9 / 8)
    assert found.host == 2 << 40
    for name in ("p3.8xlarge", "g4dn.metal"):
        with pytest.raises(ConfigError, match="(?s)with bfloat16 .*set launch.gpus_per_node"):
            cluster_of(run, instance=name, nodes=2)
    assert all(one.host for one in INSTANCES.values())
    named = cluster_of(
        run, gpu="a100-80g", gpus_per_node=4
    )  # the GPU replaces the section's machine
    assert (named.gpu.key, named.nodes, named.gpus, named.network) == (
        "a100-80g",
        4,
        16,
        25e9,
    )  # half of a p4de
    assert (
        named.host is None and cluster_of(run, gpu="h100-nvl-94g").network == 400e9
    )  # AWS has none
    assert cluster_of(make(2), gpu="l4").gpus_per_node == 2  # a part of one machine
    for words, match in (
        ({"gpu": "l4", "instance": "p5.48xlarge"}, "both l4 and p5.48xlarge"),
        ({"gpu": "l4", "gpus": 12}, "12 GPUs are not whole machines of 8"),
        ({"gpu": "l4", "gpus": 32}, "32 GPUs, but the run has 16 ranks"),
        ({"instance": "p5.48xlage"}, "nearest: p5.48xlarge"),
    ):
        with pytest.raises(ConfigError, match=match):
            cluster_of(run, **words)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="no GPU is named"):
        cluster_of(make(16))


@pytest.mark.parametrize(("own", "gpus"), [(None, 8), (4, 4), (16, 8)])
def test_a_machine_has_no_more_gpus_than_its_launch_has_ranks_there(own, gpus):
    words = ["launch.instance_type=p5.48xlarge", "launch.nodes=2"]
    words += [f"launch.gpus_per_node={own}"] if own else []
    ranks = ranks_of(make(1, *words).launch)
    assert ranks == 2 * gpus
    found = cluster_of(make(ranks, *words))
    assert (found.gpus_per_node, found.nodes) == (gpus, 2)
    # Each GPU has its own share of the machine's network.
    assert found.network == 3200e9 / 8 * gpus / 8


def test_the_parts_are_the_step_and_the_utilisation_is_that_of_the_logs():
    run = make(8, "training.batch_size=2", *OP)
    found = predict(run, cluster(8))
    assert sum(found.parts.values()) == pytest.approx(found.step_seconds)
    assert found.tokens_per_second == pytest.approx(2 * 8192 / found.step_seconds)
    assert found.mfu == pytest.approx(found.tokens_per_second * 57_914_818_560 / 989e12, rel=0.01)
    share = [found.low / found.tokens_per_second, found.high / found.tokens_per_second]
    assert share == pytest.approx([0.83, 1.22])
    assert {name for name, seconds in found.parts.items() if seconds} == {
        "matrix products",
        "attention",
        "memory traffic",
        "recomputation",
        "sharding traffic",
        "optimizer",
    }


def test_features_move_the_speed_as_they_should():
    def rate(*flags):
        return of(8, *flags).tokens_per_second

    base = rate(*OP)
    assert rate(*FULL) < base < rate("activation_checkpoint.mode=none")
    assert base < rate(*OP, "training.compile") < rate(*OP, *FLOAT8) < rate(*OP, *GATHER8)
    assert rate("training.enable_cpu_offload") < base
    plain, beside = (
        of(64, tp(8), "training.compile", *flags).parts["tensor traffic"]
        for flags in ((), ("experimental.enable_async_tensor_parallel",))
    )
    assert plain > 2 * beside
    gathers = ("default", "8", "never")
    traffic = [
        of(16, f"training.reshard_after_forward={x}").parts["sharding traffic"] for x in gathers
    ]
    assert traffic == sorted(traffic, reverse=True)
    assert traffic[2] < traffic[0]


def test_recomputation_stops_before_the_last_product_where_torch_does():
    """The kernel log of the null GPU has 1.23 times the products of Llama 3 8B, and 1.33 of
    compiled halves.
    """

    def left_out(*flags, config="llama3_1_8b"):
        step = StepSizes(make(8, *FULL, *flags, config=config), cluster(8), IDEAL)
        f = block_forward(step)
        one = step.rates.collective(step.itemsize * step.tokens * step.width, step.mesh.tensor, 1)
        collectives = tensor_traffic(step) / one / 32 if step.mesh.tensor > 1 else 8
        return (sum(f) - sum(recomputation(step, f))) / f.products, collectives

    last = 14336 / (2 * 4096 + 2 * 1024 + 3 * 14336)
    assert left_out() == left_out("training.compile") == (pytest.approx(last), 8)
    assert left_out(*FLOAT8)[0] == pytest.approx(last)
    assert left_out("float8.enable_float8_linear")[0] == 0
    assert left_out(tp(2)) == (pytest.approx(last), pytest.approx(11))
    assert left_out(tp(2), "training.compile") == (0, pytest.approx(12))
    assert left_out(config="mixtral_8x7b")[0] == 0


def test_the_bytes_of_eager_casts_are_those_of_torchao():
    rows, k, n = 512, 256, 1024
    x = torch.randn(rows, k, dtype=torch.bfloat16, requires_grad=True)
    linear = nn.Linear(k, n, bias=False, dtype=torch.bfloat16)
    apply_float8(model := nn.ModuleDict({"w": linear}), ["w"], "tensorwise")
    forward = traffic.Traffic()
    backward = traffic.Traffic()

    def size(found):
        return sum(t.nbytes for t in tree_leaves(found) if isinstance(t, torch.Tensor))

    with mock.patch.object(traffic, "_bytes", size):
        with forward:
            y = model["w"](x)
        gradient = torch.randn_like(y)
        with backward:
            y.backward(gradient)
    # It does not see the copies to the other order, of 2 bytes for each number of the backward.
    numbers = rows * k + k * n
    assert forward.moved == pytest.approx((plan_speed.CAST_EAGER - 1) * numbers, rel=0.001)
    assert backward.moved == pytest.approx(
        (plan_speed.CAST_EAGER - 1) * (numbers + 2 * rows * n), rel=0.001
    )


@pytest.mark.parametrize("tensor", [1, 2])
def test_fewer_ranks_share_experts_than_other_weights_and_rows_travel(tensor):
    """Each rank has one of 8 experts, half of it: the other half is in the other machine. Tensor-
    parallel ranks route their part of the sequence each, to all 8 neighbours.
    """
    flags = ("parallelism.expert_parallel_degree=8", tp(tensor))
    run = make(16, *flags, config="mixtral_8x7b")
    step = StepSizes(run, cluster(16), IDEAL)
    experts = 32 * 8 * 3 * 4096 * 14336
    dense = (46_702_792_704 - experts) / tensor
    shards = 16 // tensor
    assert step.owned == pytest.approx(dense / shards + experts / 8 / 2, rel=1e-3)
    assert update(step) == pytest.approx(32 * step.owned / 3350e9)
    collective = step.rates.collective
    gathers = collective(2 * dense / 32, shards, tensor) + collective(2 * experts / 8 / 32, 2, 8)
    assert sharding(step).gather == pytest.approx(32 * gathers, rel=1e-3)
    rows = step.tokens / tensor * 2 * 2 * 4096
    expected = 32 * (4 + 2 * step.recomputed) * collective(rows, 8, 1)
    assert step.traffic["expert traffic"](step) == pytest.approx(expected)


def test_tensor_parallel_ranks_divide_the_work_of_moe_layers():
    """Shared experts and routed ones take a rank's part of the sequence."""
    seconds = []
    for degree in (1, 2):
        flags = (f"training.tensor_parallel_degree={degree}", "training.batch_size=1")
        step = StepSizes(make(16, *flags, config="deepseek_v3_16b"), cluster(16), IDEAL)
        step.linears = [one for one in step.linears if "feed_forward" in one.names[-1]]
        # The first block's is dense.
        step.linears = [one for one in step.linears if "layers.0." not in one.names[0]]
        assert {name.split(".")[3] for one in step.linears for name in one.names} == {"shared"}
        forward = block_forward(step)
        seconds.append((forward.products, forward.memory))
    assert seconds[1] == pytest.approx([one / 2 for one in seconds[0]])


@pytest.mark.parametrize(
    "schedule, microbatches, idle",
    [("1F1B", 8, 7 / 8), ("GPipe", 16, 7 / 16), ("Interleaved1F1B", 8, 7 / 16)],
)
def test_the_bubble_is_that_of_the_schedule(schedule, microbatches, idle):
    flags = (
        f"pipeline_parallel_schedule={schedule}",
        f"pipeline_parallel_microbatches={microbatches}",
    )
    found = of(
        8,
        "training.batch_size=16",
        *(f"experimental.{x}" for x in ("pipeline_parallel_degree=8", *flags)),
    )
    busy = found.step_seconds - found.parts["pipeline bubble"] - found.parts["optimizer"]
    assert found.parts["pipeline bubble"] == pytest.approx(idle * busy)


def test_mxfp8_counts_as_bf16_and_needs_a_gpu_that_has_it():
    mx = (*FLOAT8, "float8.recipe_name=mxfp8")
    found = of(8, *mx, gpu="b200-180g")
    plain = of(8, "training.compile", gpu="b200-180g")
    assert found.step_seconds == plain.step_seconds
    assert any("MXFP8 count as in bf16" in text for text in found.assumptions)
    assert not any("MXFP8" in text for text in plain.assumptions)
    with pytest.raises(ConfigError, match="h100-80g has no MXFP8"):
        of(8, *mx)
    with pytest.raises(ConfigError, match="a100-80g has no float8"):
        of(8, *FLOAT8, gpu="a100-80g")
    assert of(8, *mx, "float8.emulate").step_seconds > 0


def test_a_small_model_waits_for_the_host():
    found = of(1, "training.batch_size=1", "training.seq_len=128", config="llama3_2_1b")
    assert found.parts["launches"] > 0
    assert found.step_seconds - found.parts["optimizer"] == pytest.approx(
        16 * computing.LAUNCHES_EAGER
    )


#: Of AWS on H100, of torchtitan on A100 and H200, per GPU; `benchmarks/plan_speed.py` has all.
@pytest.mark.parametrize(
    "gpu, world, flags, published",
    [
        ("h100-80g", 32, ("training.batch_size=1", *OP), 6475),
        ("h100-80g", 32, ("training.batch_size=1", *GATHER8, *OP), 8950),
        ("h200-141g", 32, ("training.batch_size=2", *GATHER8, *OP), 10938),
        ("a100-80g", 64, ("training.batch_size=1", *OP), 2973),
    ],
)
def test_published_runs_lie_in_the_range(gpu, world, flags, published):
    found = of(world, "training.seq_len=8192", *flags, gpu=gpu)
    assert found.low <= published <= found.high, math.log(found.tokens_per_second / published)


KEMPNER = (
    "activation_checkpoint.mode=full training.compile training.seq_len=4096 "
    "training.dtype=bfloat16 "
)


#: Of KempnerForge on machines with 4 H200 (2026-04), tokens/s per GPU, in two micro-batches. No
#: constant was fitted on them.
@pytest.mark.parametrize(
    "world, tensor, published, error",
    [
        (1, 1, 10471, -0.16),
        (4, 4, 25135 / 4, 0.01),
        (8, 4, 44299 / 8, 0.09),
        (32, 4, 155917 / 32, 0.205),
    ],
)
def test_runs_that_the_fit_has_not_seen_lie_in_the_range(world, tensor, published, error):
    flags = [f"training.tensor_parallel_degree={tensor}", "training.batch_size=4"]
    flags += [
        f"training.global_batch_size={8 * world // tensor}",
        "model.vocab_size=128256",
        *KEMPNER.split(),
    ]
    run = run_from("llama3_8b.toml", world, *(f"--{flag}" for flag in flags))
    found = predict(run, cluster_of(run, gpu="h200-141g", gpus_per_node=min(world, 4)))
    assert found.low <= published <= found.high
    assert found.tokens_per_second / published - 1 == pytest.approx(
        error, abs=0.01
    )  # as titanlite/plan/FORMULAS.md has it
