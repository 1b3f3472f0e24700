"""A trace runs the real step at real sizes without data, and finds the bytes of the real run."""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from tests.plan.measured import CASES, allocated, measure, planned
from tests.support.pool import Pools
from titanlite.cli.plan.memory_trace import trace
from titanlite.config.errors import ConfigError
from titanlite.models.layers import FeedForward
from titanlite.plan.memory import estimate
from titanlite.plan.parts import PARTS
from titanlite.resolve.load import check_config
from titanlite.run.config import RunConfig

#: Whole runs in a second each; the benchmark compares all.
QUICK = ["1 rank, AC full", "fsdp 2, four micro-batches"]
SLOW = [
    "1 rank, float8 rowwise, AC op",
    "fsdp 2, four micro-batches, reduced each",
    "tp 2",
    "tp 2, norms around, AC full",
    "cp 2",
    "pp 2, Interleaved1F1B",
    "MoE, experts over tp 2, fsdp 2, AC full",
    "hsdp 2 x 2",
]


def config(ranks: int, name: str = "llama3_1_8b.toml", **flags: Any) -> RunConfig:
    given = {"model.overrides.n_layers": 2, "training.global_batch_size": -1, **flags}
    return check_config(
        [f"--job.config_file={name}", *(f"--{k}={v}" for k, v in given.items())],
        ranks,
        training=False,
    )[1]


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(
    "case", [*QUICK, *(pytest.param(case, marks=pytest.mark.slow) for case in SLOW)]
)
def test_the_peak_is_that_of_the_real_run(pool, case):
    ranks = CASES[case][0]
    real = pool(ranks).run(measure, case)[ranks - 1].peak
    traced = trace(planned(case), ranks - 1, "cpu").peak
    assert traced.total == pytest.approx(real.total, rel=0.05)
    assert (traced.phase, traced.module) == (real.phase, real.module)
    formula = estimate(planned(case), ranks - 1, "cpu").peak.total
    assert formula == pytest.approx(real.total, rel=0.1)
    for part, size in real.parts.items():
        assert traced.parts[part] == pytest.approx(size, rel=0.05, abs=0.02 * real.total), part


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(
    "ranks, name, flags",
    [
        (8, "llama3_1_8b.toml", {"activation_checkpoint.mode": "full", "training.loss_chunks": 8}),
        (8, "olmo3_7b.toml", {"training.tensor_parallel_degree": 2}),
        (8, "gemma3_4b.toml", {"activation_checkpoint.mode": "full"}),
        (
            64,
            "mixtral_8x7b.toml",
            {"activation_checkpoint.mode": "full", "model.overrides.n_layers": 3},
        ),
    ],
)
def test_formulas_and_trace_agree_on_each_part(ranks, name, flags):
    run = config(ranks, name, **flags)
    formula = estimate(run, 0).peak
    traced = trace(run).peak
    for part in PARTS:
        assert abs(formula.parts.get(part, 0) - traced.parts[part]) < 0.01 * traced.total, part


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("ranks", [1, 2])
def test_ranks_without_others_of_their_data_reduce_in_one_buffer(ranks: int) -> None:
    """Tensor parallelism alone: the peak is where the embedding's gradient is cast."""
    flags = {
        "training.tensor_parallel_degree": ranks,
        "training.loss_chunks": 8,
        "training.compile": "true",
        "model.overrides.n_layers": 1,
    }
    run = config(ranks, "llama3_1_8b.toml", **flags)
    formula = estimate(run, 0).peak
    traced = trace(run).peak
    assert formula.total == pytest.approx(traced.total, rel=0.001)
    assert formula.module == traced.module


#: Blocks are most of a step.
NO_LOSS = {"training.loss_chunks": 8, "model.vocab_size": 1024, "model.overrides.n_layers": 1}
MX = {"float8.enable_float8_linear": "true", "float8.recipe_name": "mxfp8"}


#: Mixtures of many narrow experts: name, flavor, changes of the shape.
NARROW_EXPERTS = {
    "mixtral": (
        "8x7B",
        {
            "n_experts": 64,
            "top_k": 6,
            "ffn_dim": 1408,
            "dim": 2048,
            "n_heads": 16,
            "n_kv_heads": 16,
        },
    ),
    "qwen3_moe": ("30B-A3B", {}),
    # The first block is dense.
    "deepseek_v3": ("16B", {"n_layers": 3}),
}


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(
    ("name", "experts_over", "tensor", "mode"),
    [
        ("mixtral", 2, 1, "full"),
        ("mixtral", 4, 2, "none"),
        ("qwen3_moe", 8, 1, "none"),
        ("deepseek_v3", 8, 1, "full"),
        ("deepseek_v3", 4, 2, "full"),
    ],
)
def test_the_memory_of_narrow_experts_over_ranks_is_that_of_a_trace(
    name: str, experts_over: int, tensor: int, mode: str
) -> None:
    """On 2 ranks the peak is where FSDP puts experts in order, on 8 where rows come back."""
    flavor, shape = NARROW_EXPERTS[name]
    flags = {f"model.overrides.{key}": value for key, value in {"n_layers": 2, **shape}.items()}
    flags |= {
        "model.name": name,
        "model.flavor": flavor,
        "model.vocab_size": 1024,
        "training.batch_size": 1,
        "training.seq_len": 4096,
        "training.global_batch_size": -1,
        "training.loss_chunks": 8,
        "parallelism.expert_parallel_degree": experts_over,
        "training.tensor_parallel_degree": tensor,
        "activation_checkpoint.mode": mode,
    }
    run = check_config([f"--{key}={value}" for key, value in flags.items()], 8, training=False)[1]
    formula = estimate(run, 0).peak
    traced = trace(run).peak
    assert formula.total == pytest.approx(traced.total, rel=0.003)
    assert formula.phase == traced.phase


@pytest.mark.slow
@pytest.mark.parametrize(
    "flags",
    [
        {"activation_checkpoint.mode": "full"},
        {"training.tensor_parallel_degree": 2},
    ],
    ids=str,
)
def test_the_memory_of_mx_products_is_that_of_torchaos(flags: dict[str, Any]) -> None:
    """Stand-ins for its kernels make the same tensors."""
    run = config(8, **NO_LOSS, **flags, **MX)
    assert 0.99 < estimate(run, 0).peak.total / trace(run).peak.total < 1.06


TP = {"training.tensor_parallel_degree": 2}
WHOLE = {**TP, "training.enable_loss_parallel": "false"}
COMPILED = {**TP, "training.compile": "true"}
FLOAT = {"training.mixed_precision_param": "float32"}
PENALTY = {"training.z_loss": 1e-4}
CHUNKS = {"training.loss_chunks": 2}


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(
    "flags",
    [
        TP | CHUNKS,
        TP | PENALTY,
        COMPILED | FLOAT,
        COMPILED | CHUNKS,
        WHOLE | FLOAT,
        WHOLE | PENALTY | CHUNKS,
        PENALTY | CHUNKS,
    ],
    ids=str,
)
def test_formula_and_trace_agree_on_every_kind_of_loss(flags: dict[str, Any]) -> None:
    run = config(
        8, **{"activation_checkpoint.mode": "full", "model.overrides.n_layers": 1, **flags}
    )
    formula = estimate(run, 0).peak
    traced = trace(run).peak
    assert formula.total == pytest.approx(traced.total, rel=0.003)


def test_one_rank_gathers_no_weights_that_need_no_cast() -> None:
    run = config(1, **{"model.overrides.n_layers": 1, "training.dtype": "bfloat16"})
    formula = estimate(run, 0).peak
    traced = trace(run).peak
    assert formula.total == pytest.approx(traced.total, rel=0.003)
    assert formula.parts.get("gathered weights", 0) == traced.parts["gathered weights"] == 0


#: Temporary buffers of the CPU's kernels, and numbers of each token, are in neither count.
BELOW_OPERATORS = 0.03


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    ["tp 2, AC full, large vocabulary, z-loss", "fsdp 2"],
)
def test_a_trace_has_the_bytes_that_the_allocator_hands_out_in_a_real_step(
    pool: Pools, case: str
) -> None:
    ranks = CASES[case][0]
    real = pool(ranks).run(allocated, case)[ranks - 1]
    traced = trace(planned(case), ranks - 1, "cpu")
    before = sum(traced.moments[0].parts[part] for part in ("parameters", "optimizer"))
    assert traced.peak.total - before == pytest.approx(real, rel=BELOW_OPERATORS)


@pytest.mark.slow
def test_a_gpu_takes_the_fused_optimizer():
    fused, looped = (
        trace(config(8), device=device).moments[-1].parts["working memory"]
        for device in ("cuda", "cpu")
    )
    assert fused < 1 << 20 < 100 << 20 < looped


@pytest.mark.parametrize("key", ["activation_checkpoint.offload", "training.enable_cpu_offload"])
def test_a_run_that_offloads_is_planned_by_formula(key: str) -> None:
    run = config(8, **{"activation_checkpoint.mode": "full", key: "true"})
    with pytest.raises(ConfigError, match="this run offloads to it\n +plan it by formula"):
        trace(run)
    assert estimate(run).host


def test_a_run_in_progress_is_not_disturbed():
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    try:
        with pytest.raises(RuntimeError, match="another process"):
            trace(config(8))
    finally:
        dist.destroy_process_group()


def test_a_model_that_needs_its_data_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FeedForward, "forward", lambda _, x: x[x.nonzero(as_tuple=True)])
    with pytest.raises(ConfigError, match="--exact: torch cannot run this model without data: "):
        trace(config(1, **{"model.overrides.n_layers": 1}))


def test_experts_over_ranks_that_do_not_divide_the_rows_are_refused_and_planned_by_formula() -> (
    None
):
    flags = [
        "--model.name=mixtral",
        "--model.vocab_size=512",
        "--model.overrides.n_experts=3",
        "--training.seq_len=256",
    ]
    run = check_config(
        [*flags, "--training.batch_size=1", "--parallelism.expert_parallel_degree=3"],
        3,
        training=False,
    )[1]
    with pytest.raises(
        ConfigError, match="a trace cannot divide the rows of 256 tokens evenly over 3 ranks"
    ):
        trace(run, 0)
    assert estimate(run).peak.total > 0
