"""A trace runs the real step at real sizes without data, and finds the bytes of the real run."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.plan.measured import CASES, allocated, measure, measure_step, planned, second_step
from tests.support.block_trace import trace_block
from tests.support.hf import TOML
from tests.support.hf_compare import flags_of
from tests.support.run_of import run_from
from tests.support.tiny import KEPT_TOKENS
from titanlite.cli.plan.memory_trace import trace
from titanlite.config.errors import ConfigError
from titanlite.dist.dist_env import DistEnv
from titanlite.models.layers import FeedForward
from titanlite.parallel.fsdp import DTYPES
from titanlite.plan.memory import estimate, with_vocabulary
from titanlite.plan.parts import PARTS, RankMemory
from titanlite.plan.rank_sizes import RankSizes, block_memory
from titanlite.resolve.load import check_config
from titanlite.run.config import RunConfig

#: Runs that a trace is held against; the benchmark compares all.
TRACED = [
    "1 rank, AC full",
    "fsdp 2, four micro-batches",
    "1 rank, float8 rowwise, AC op",
    "fsdp 2, four micro-batches, reduced each",
    "tp 2, norms around, AC full",
    "cp 2",
    "pp 2, Interleaved1F1B",
    "MoE, experts over tp 2, fsdp 2, AC full",
    "hsdp 2 x 2",
]


def config(ranks: int, name: str = "llama3_1_8b.toml", **flags: Any) -> RunConfig:
    given = {"model.overrides.n_layers": 2, "training.global_batch_size": -1, **flags}
    return run_from(name, ranks, *(f"--{key}={value}" for key, value in given.items()))


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("case", TRACED)
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
def test_ranks_without_others_of_their_data_reduce_in_one_buffer(ranks):
    """Tensor parallelism alone: the peak is where the embedding's gradient is cast."""
    flags = {
        "training.tensor_parallel_degree": ranks,
        "training.loss_chunks": 8,
        "training.compile": "true",
        "model.overrides.n_layers": 1,
    }
    run = config(ranks, **flags)
    formula, traced = _both(run, near=0.001)
    assert formula.module == traced.module


#: Blocks are most of a step.
NO_LOSS = {"training.loss_chunks": 8, "model.vocab_size": 1024, "model.overrides.n_layers": 1}
MX = {"float8.enable_float8_linear": "true", "float8.recipe_name": "mxfp8"}


#: Many narrow experts.
NARROW = {
    "n_experts": 64,
    "top_k": 6,
    "ffn_dim": 1408,
    "dim": 2048,
    "n_heads": 16,
    "n_kv_heads": 16,
}


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(
    ("name", "flavor", "shape", "experts_over", "tensor", "mode"),
    [
        ("mixtral", "8x7B", NARROW, 2, 1, "full"),
        ("qwen3_moe", "30B-A3B", {}, 8, 1, "none"),
        # The first block is dense.
        ("deepseek_v3", "16B", {"n_layers": 3}, 4, 2, "full"),
    ],
)
def test_the_memory_of_narrow_experts_over_ranks_is_that_of_a_trace(
    name, flavor, shape, experts_over, tensor, mode
):
    """On 2 ranks the peak is where FSDP puts experts in order, on 8 where rows come back."""
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
    formula, traced = _both(run)
    assert formula.phase == traced.phase


def _both(run: RunConfig, near: float = 0.003) -> tuple[RankMemory, RankMemory]:
    """The peaks of formula and trace, whose totals agree."""
    formula, traced = estimate(run, 0).peak, trace(run).peak
    assert formula.total == pytest.approx(traced.total, rel=near)
    return formula, traced


@pytest.mark.slow
@pytest.mark.parametrize(
    "flags",
    [
        {"activation_checkpoint.mode": "full"},
        {"training.tensor_parallel_degree": 2},
    ],
    ids=str,
)
def test_the_memory_of_mx_products_is_that_of_torchaos(flags):
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
def test_formula_and_trace_agree_on_every_kind_of_loss(flags):
    run = config(
        8, **{"activation_checkpoint.mode": "full", "model.overrides.n_layers": 1, **flags}
    )
    _both(run)


def test_one_rank_gathers_no_weights_that_need_no_cast():
    run = config(1, **{"model.overrides.n_layers": 1, "training.dtype": "bfloat16"})
    formula, traced = _both(run)
    assert formula.parts.get("gathered weights", 0) == traced.parts["gathered weights"] == 0


#: Temporary buffers of the CPU's kernels, and numbers of each token, are in neither count.
BELOW_OPERATORS = 0.03


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    ["tp 2, AC full, large vocabulary, z-loss", "fsdp 2"],
)
def test_a_trace_has_the_bytes_that_the_allocator_hands_out_in_a_real_step(pool, case):
    ranks = CASES[case][0]
    real = pool(ranks).run(allocated, case)[ranks - 1]
    traced = trace(planned(case), ranks - 1, "cpu")
    before = sum(traced.moments[0].parts[part] for part in ("parameters", "optimizer"))
    assert traced.peak.total - before == pytest.approx(real, rel=BELOW_OPERATORS)


@pytest.mark.parametrize("key", ["activation_checkpoint.offload", "training.enable_cpu_offload"])
def test_a_run_that_offloads_is_planned_by_formula(key):
    run = config(8, **{"activation_checkpoint.mode": "full", key: "true"})
    with pytest.raises(ConfigError, match="this run offloads to it\n +plan it by formula"):
        trace(run)
    assert estimate(run).host


def test_a_model_that_needs_its_data_is_refused(monkeypatch):
    monkeypatch.setattr(FeedForward, "forward", lambda _, x: x[x.nonzero(as_tuple=True)])
    with pytest.raises(ConfigError, match="--exact: torch cannot run this model without data: "):
        trace(config(1, **{"model.overrides.n_layers": 1}))


def test_experts_over_ranks_that_do_not_divide_the_rows_are_refused_and_planned_by_formula():
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


SIZES = {"model__vocab_size": 2304, "training__seq_len": 128, "training__batch_size": 2}
MASKS = {"data__mask_documents": "true"}


def measure_hf(world: DistEnv, flags: list[str]) -> RankMemory:
    """Measure a real step after the first.

    The least of three: a thread of gloo may hold a buffer for a moment longer.
    """
    with second_step(world, flags, TOML) as (run, parts, batches):
        steps = [measure_step(world, run, parts, batches) for _ in range(3)]
        return min(steps, key=lambda step: step.peak.total)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "keys"),
    [
        ("qwen3", MASKS),
        ("deepseek_v3", {**MASKS, "training__mixed_precision_param": "bfloat16"}),
    ],
    ids=str,
)
def test_the_peak_is_that_of_a_real_run_of_transformers(pool, tmp_path, kind, keys):
    flags = [*flags_of(tmp_path, kind, **SIZES, **keys), KEPT_TOKENS]
    real = pool(2).run(measure_hf, flags)[1].peak
    run = run_from(TOML, 2, *flags)
    traced = trace(run, 1, "cpu").peak
    assert traced.total == pytest.approx(real.total, rel=0.05)
    assert traced.phase == real.phase
    for part, size in real.parts.items():
        assert traced.parts[part] == pytest.approx(size, rel=0.05, abs=0.02 * real.total), part


@pytest.mark.slow
def test_experts_that_torch_runs_in_bfloat16_alone_are_refused(tmp_path):
    flags = flags_of(tmp_path, "qwen3_moe", **SIZES)
    in_bf16 = run_from(TOML, 2, *flags, "--training.mixed_precision_param=bfloat16")
    assert trace(in_bf16).peak.total > 0
    with pytest.raises(ConfigError, match='try training.mixed_precision_param = "bfloat16"'):
        trace(run_from(TOML, 2, *flags))


#: The trace takes all blocks for equal.
DEEPSEEK = [
    "--model.name=deepseek_v3",
    "--model.flavor=debugmodel",
    "--model.overrides.n_dense_layers=0",
]
LLAMA4 = [
    "--model.name=llama4",
    "--model.flavor=debugmodel",
    "--model.overrides.sparse_step=1",
]
MODELS = {
    "llama3": ["--job.config_file=debug_model.toml"],
    "mixtral": ["--model.name=mixtral", "--model.flavor=debugmodel"],
    "gpt_oss": ["--model.name=gpt_oss", "--model.flavor=debugmodel"],
    "qwen3": ["--model.name=qwen3", "--model.flavor=debugmodel"],
    "deepseek_v3": DEEPSEEK,
    "deepseek_v3, latent queries": [
        *DEEPSEEK,
        "--model.overrides.q_lora_rank=96",
        '--model.rope_scaling={rope_type = "yarn", factor = 4, mscale_all_dim = 1.0, '
        "original_max_position_embeddings = 64}",
    ],
    "llama4": [*LLAMA4, "--model.overrides.nope_every=0"],
    "llama4, no RoPE": [*LLAMA4, "--model.overrides.nope_every=1"],
    "olmo3": ["--model.name=olmo3", "--model.flavor=debugmodel"],
    "gemma3": ["--model.name=gemma3", "--model.flavor=debugmodel"],
}
MODES = {
    "none": "--activation_checkpoint.mode=none",
    "full": "--activation_checkpoint.mode=full",
    "op": "--activation_checkpoint.selective_ac_option=op",
    "every": "--activation_checkpoint.selective_ac_option=2",
}


@pytest.mark.slow_after(10)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("model", MODELS)
def test_the_plan_counts_what_a_trace_counts(model, mode):
    shape = ["--training.batch_size=4", "--training.seq_len=128", "--training.steps=2"]
    run = with_vocabulary(check_config([*MODELS[model], MODES[mode], *shape], 1)[1], 1000)
    args = run.model_args()
    blocks = run.spec.block_names(args)
    sizes = RankSizes(run, args, 0, "cpu")
    modes = {block: sizes.mode(block) for block in blocks}
    kept = sum(block_memory(sizes.shape_of(one), modes[one]).kept for one in blocks)
    plain = sum(block_memory(sizes.shape_of(one), "none").kept for one in blocks)
    dtype = DTYPES[run.training.mixed_precision_param]
    traced = trace_block(
        run.spec.build_on_meta(args),
        blocks,
        run.activation_checkpoint,
        (4, 128),
        torch.device("cpu"),
        dtype,
    )
    # Masks of a window, and an MoE layer's counts, are left out by the plan.
    assert kept == pytest.approx(traced.total_bytes, rel=1e-3)
    assert plain == pytest.approx(traced.blocks * traced.plain_bytes, rel=1e-3)
    if model in ("llama3", "qwen3"):
        assert kept == traced.total_bytes
        assert plain == traced.blocks * traced.plain_bytes
    assert sum(mode != "none" for mode in modes.values()) == traced.recomputing
