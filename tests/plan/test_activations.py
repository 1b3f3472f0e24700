"""What blocks keep for the backward: the plan's formulas against a trace of a block."""

from __future__ import annotations

import pytest
import torch

from tests.support.block_trace import trace_block
from titanlite.parallel.fsdp import DTYPES
from titanlite.plan.memory import with_vocabulary
from titanlite.plan.rank_sizes import RankSizes, block_memory
from titanlite.resolve.load import check_config

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
    "none": ["--activation_checkpoint.mode=none"],
    "full": ["--activation_checkpoint.mode=full"],
    "op": ["--activation_checkpoint.selective_ac_option=op"],
    "every": ["--activation_checkpoint.selective_ac_option=2"],
}


@pytest.mark.slow_after(10)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("model", MODELS)
def test_the_plan_counts_what_a_trace_counts(model: str, mode: str) -> None:
    shape = ["--training.batch_size=4", "--training.seq_len=128", "--training.steps=2"]
    run = with_vocabulary(check_config([*MODELS[model], *MODES[mode], *shape], 1)[1], 1000)
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
