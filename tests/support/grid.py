"""Every way to divide the work, times every way to save memory and time: one table.

A cell is a config: flags as a user gives them, over the default TOML. What the config takes trains
as `transformers` does on one process; what it refuses is refused with its reason. test_grid.py runs
the cells on one and two ranks, test_grid_of_four_ranks.py the others, so that two processes share
the work.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from tests.support.compare import (
    DOCUMENTS,
    FLAT,
    GLOBAL_BATCH,
    LABELS,
    SEQ,
    TOKENS,
    WARM,
    References,
)
from tests.support.harness import Degrees, Run
from titanlite.parallel.schedules import SCHEDULES
from titanlite.resolve.load import load_config
from titanlite.run.config import RunConfig

#: Two blocks of grouped queries, as small as four ranks can share.
MODEL = {
    "dim": 64,
    "n_layers": 2,
    "n_heads": 4,
    "n_kv_heads": 2,
    "multiple_of": 32,
    "max_seq_len": 64,
}
SHARED = {
    **{f"model.overrides.{key}": value for key, value in MODEL.items()},
    "model.vocab_size": 192,
    "training.seq_len": SEQ,
    "training.global_batch_size": GLOBAL_BATCH,
    "training.reshard_after_forward": "default",
    "validation.enable": "false",
    "compile.backend": "aot_eager",
}

FSDP = "training.data_parallel_shard_degree"
REPLICAS = "training.data_parallel_replicate_degree"
TP = "training.tensor_parallel_degree"
EP = "parallelism.expert_parallel_degree"
CP = "experimental.context_parallel_degree"
PP = "experimental.pipeline_parallel_degree"
RESHARD = "training.reshard_after_forward"
SYNC = "training.gradient_sync"
SCHEDULE = "experimental.pipeline_parallel_schedule"
SPLIT = "experimental.pipeline_parallel_split_points"
LOSS_PARALLEL = "training.enable_loss_parallel"
#: A pipeline cuts four blocks, two for each rank.
FOUR = {"model.overrides.n_layers": 4}


@dataclass(frozen=True)
class Row:
    """How the work is divided."""

    ranks: int
    flags: dict[str, Any]


ROWS = {
    "fsdp 2": Row(2, {FSDP: 2}),
    "fsdp 4": Row(4, {FSDP: 4}),
    "hsdp 2 x 2": Row(4, {REPLICAS: 2, FSDP: 2}),
    "ddp 2": Row(2, {REPLICAS: 2, FSDP: 1}),
    "tp 2": Row(2, {TP: 2}),
    "tp 2, fsdp 2": Row(4, {TP: 2, FSDP: 2}),
    "cp 2": Row(2, {CP: 2}),
    "cp 2, fsdp 2": Row(4, {CP: 2, FSDP: 2}),
    **{f"pp 2, {name}": Row(2, {PP: 2, SCHEDULE: name, **FOUR}) for name in SCHEDULES},
    "pp 2, fsdp 2": Row(4, {PP: 2, FSDP: 2, **FOUR}),
    "pp 2, tp 2": Row(4, {PP: 2, TP: 2, **FOUR}),
}


@dataclass(frozen=True)
class Column:
    """What each rank does with its part."""

    accumulation: int
    optimizer: str
    flags: dict[str, Any]


MODE = "activation_checkpoint.mode"
OPTION = "activation_checkpoint.selective_ac_option"
CHUNKS = "training.loss_chunks"
UNITS = "training.fsdp_units"
MIN_PARAMS = "training.fsdp_min_params"
TIED = {"model.overrides.tied": "true"}
AHEAD = {RESHARD: "always", "training.prefetch": 1}
ZERO_BUBBLE = {PP: 2, SCHEDULE: "ZBVZeroBubble", **FOUR}
#: Rows beside the product, with micro-batches per step.
MORE = {
    "1 rank": (Row(1, {}), 1),
    "fsdp 2, freed": (Row(2, {FSDP: 2, **AHEAD}), 2),
    "fsdp 2, four micro-batches reduced each": (Row(2, {FSDP: 2, SYNC: "every"}), 4),
    "fsdp 4, over 2": (Row(4, {FSDP: 4, RESHARD: 2}), 2),
    "tp 2, whole logits": (Row(2, {TP: 2, LOSS_PARALLEL: "false"}), 2),
    "tp 2, recomputed, compiled": (Row(2, {TP: 2, MODE: "full", "training.compile": "true"}), 1),
    "tp 2, ddp 2": (Row(4, {TP: 2, REPLICAS: 2, FSDP: 1}), 2),
    "tp 2, fsdp 2, freed": (Row(4, {TP: 2, FSDP: 2, **AHEAD}), 2),
    "tp 2, fsdp 2, reduced with each": (Row(4, {TP: 2, FSDP: 2, SYNC: "every"}), 2),
    "tp 2, tied": (Row(2, {TP: 2, **TIED}), 2),
    "tp 2, fsdp 2, tied": (Row(4, {TP: 2, FSDP: 2, **TIED}), 2),
    "cp 4": (Row(4, {CP: 4}), 2),
    "cp 2, reduced with each": (Row(2, {CP: 2, SYNC: "every"}), 2),
    "cp 2, tied": (Row(2, {CP: 2, **TIED}), 2),
    "cp 2, fsdp 2, over 2": (Row(4, {CP: 2, FSDP: 2, RESHARD: 2, "training.prefetch": 1}), 2),
    "cp 2, ddp 2": (Row(4, {CP: 2, REPLICAS: 2, FSDP: 1}), 2),
    "cp 2, tp 2": (Row(4, {CP: 2, TP: 2}), 2),
    "pp 4": (Row(4, {PP: 4, **FOUR}), 2),
    "pp 4, stages without blocks": (
        Row(4, {PP: 4, SPLIT: '["layers.0","norm","output"]', **FOUR}),
        2,
    ),
    "pp 2, fsdp 2, gathered again": (Row(4, {PP: 2, FSDP: 2, RESHARD: "always", **FOUR}), 2),
    "pp 2, fsdp 2, zero bubble": (Row(4, {FSDP: 2, **ZERO_BUBBLE}), 2),
    "pp 2, ddp 2": (Row(4, {PP: 2, REPLICAS: 2, FSDP: 1, **FOUR}), 2),
    "pp 2, tp 2, zero bubble, whole logits": (
        Row(4, {TP: 2, LOSS_PARALLEL: "false", **ZERO_BUBBLE}),
        2,
    ),
    "pp 2, cp 2": (Row(4, {PP: 2, CP: 2, **FOUR}), 2),
    "pp 2, tp 2, fsdp 2": (Row(8, {PP: 2, TP: 2, FSDP: 2, **FOUR}), 2),
    "pp 2, tp 2, cp 2": (Row(8, {PP: 2, TP: 2, CP: 2, SCHEDULE: "Interleaved1F1B", **FOUR}), 2),
    "cp 2, tp 2, fsdp 2, recomputed": (Row(8, {CP: 2, TP: 2, FSDP: 2, MODE: "full"}), 1),
    "fsdp 2, units by size": (
        Row(2, {FSDP: 2, UNITS: "size", MIN_PARAMS: 30_000, "training.prefetch": 1}),
        2,
    ),
    "fsdp 2, tied, classes": (
        Row(2, {FSDP: 2, UNITS: '["Block","Embedding"]', "training.prefetch": 2, **TIED}),
        2,
    ),
    "fsdp 2, units in recomputed blocks": (
        Row(2, {FSDP: 2, UNITS: '["Block","Attention"]', MODE: "full"}),
        2,
    ),
    # The loss in chunks, also more than the tokens need.
    "chunks, fsdp 2, freed, tied": (Row(2, {CHUNKS: 100, FSDP: 2, RESHARD: "always", **TIED}), 1),
    "chunks, fsdp 2, one unit, freed": (
        Row(2, {CHUNKS: 3, FSDP: 2, RESHARD: "always", UNITS: "root"}),
        2,
    ),
    "chunks, fsdp 2, compiled": (Row(2, {CHUNKS: 3, FSDP: 2, "training.compile": "true"}), 1),
    "chunks, hsdp 2 x 2": (Row(4, {CHUNKS: 3, REPLICAS: 2, FSDP: 2}), 1),
    "chunks, tp 2": (Row(2, {CHUNKS: 3, TP: 2}), 1),
    "chunks, tp 2, fsdp 2, whole logits": (
        Row(4, {CHUNKS: 3, TP: 2, FSDP: 2, LOSS_PARALLEL: "false"}),
        1,
    ),
    "chunks, cp 2": (Row(2, {CHUNKS: 3, CP: 2}), 1),
    "chunks, pp 2, cp 2": (Row(4, {CHUNKS: 3, PP: 2, CP: 2, **FOUR}), 1),
    "chunks, pp 2, zero bubble": (Row(2, {CHUNKS: 3, **ZERO_BUBBLE}), 2),
    "chunks, pp 2, loss compiled": (
        Row(
            2,
            {
                CHUNKS: 3,
                **ZERO_BUBBLE,
                "training.compile": "true",
                "compile.components": '["loss"]',
            },
        ),
        1,
    ),
}
#: The plain backends do not divide a graph by a budget; this one divides it as inductor does, and
#: builds no code.
BUDGET = {
    "training.compile": "true",
    "compile.backend": "aot_eager_decomp_partition",
    MODE: "budget",
    "activation_checkpoint.memory_budget": 0.3,
}
MORE |= {
    "fsdp 2, budget": (Row(2, {FSDP: 2, **BUDGET}), 1),
    "tp 2, budget": (Row(2, {TP: 2, **BUDGET}), 2),
    "tp 2, fsdp 2, budget": (Row(4, {TP: 2, FSDP: 2, **BUDGET}), 1),
    "pp 2, tp 2, budget": (Row(4, {PP: 2, TP: 2, **BUDGET, **FOUR}), 1),
}
#: A window shorter than the sequence, and QK norm with heads wider than dim / heads.
MISTRAL = {"model.name": "mistral", "model.overrides.window": 12}
QWEN3 = {"model.name": "qwen3", "model.overrides.head_dim": 32, "model.overrides.tied": "false"}
BY_OPERATION = {MODE: "selective", OPTION: "op"}
GRAPH = {"training.compile": "true", MODE: "selective", OPTION: "op"}
MORE |= {
    "mistral, fsdp 2, by operation, compiled": (Row(2, {FSDP: 2, **MISTRAL, **GRAPH}), 1),
    "mistral, tp 2": (Row(2, {TP: 2, **MISTRAL}), 2),
    "mistral, cp 2": (Row(2, {CP: 2, **MISTRAL}), 1),
    "mistral, cp 2, tp 2, compiled": (Row(4, {CP: 2, TP: 2, **MISTRAL, **GRAPH}), 1),
    "mistral, pp 2, fsdp 2": (Row(4, {PP: 2, FSDP: 2, **MISTRAL, **FOUR}), 2),
    "qwen3, tp 2": (Row(2, {TP: 2, **QWEN3}), 2),
    "qwen3, tp 2, fsdp 2, tied": (Row(4, {TP: 2, FSDP: 2, **QWEN3, **TIED}), 2),
    "qwen3, pp 2, tp 2": (Row(4, {PP: 2, TP: 2, **QWEN3, **FOUR}), 2),
    "qwen3, cp 2, tp 2, recomputed": (Row(4, {CP: 2, TP: 2, MODE: "full", **QWEN3}), 1),
}
#: Sinks, biases, experts, a window in every second block.
GPT_OSS = {
    "model.name": "gpt_oss",
    "model.overrides.head_dim": 16,
    "model.overrides.ffn_dim": 48,
    "model.overrides.n_experts": 4,
    "model.overrides.top_k": 2,
    "model.overrides.window": 12,
    "model.overrides.aux_loss": 0.0,
}
EXPERTS = "parallelism.expert_parallel_degree"
MORE |= {
    "gpt_oss, 1 rank": (Row(1, GPT_OSS), 2),
    "gpt_oss, fsdp 2, by operation, compiled": (Row(2, {FSDP: 2, **GPT_OSS, **GRAPH}), 1),
    "gpt_oss, hsdp 2 x 2": (Row(4, {REPLICAS: 2, FSDP: 2, **GPT_OSS}), 2),
    "gpt_oss, cp 2": (Row(2, {CP: 2, **GPT_OSS}), 1),
    "gpt_oss, cp 2, fsdp 2, recomputed, compiled": (
        Row(4, {CP: 2, FSDP: 2, MODE: "full", "training.compile": "true", **GPT_OSS}),
        1,
    ),
    "gpt_oss, pp 2, fsdp 2, chunks": (Row(4, {PP: 2, FSDP: 2, CHUNKS: 3, **GPT_OSS, **FOUR}), 2),
    "gpt_oss, tp 2": (Row(2, {TP: 2, **GPT_OSS}), 2),
    "gpt_oss, cp 2, tp 2, by operation, compiled": (Row(4, {CP: 2, TP: 2, **GPT_OSS, **GRAPH}), 1),
    "gpt_oss, ep 2": (Row(2, {EXPERTS: 2, **GPT_OSS}), 2),
    "gpt_oss, ep 2, fsdp 4, recomputed": (Row(4, {EXPERTS: 2, MODE: "full", **GPT_OSS}), 1),
    "gpt_oss, ep 2 over tp 2": (Row(2, {EXPERTS: 2, TP: 2, **GPT_OSS}), 2),
    "gpt_oss, ep 2 over tp 2, ddp 2, compiled": (
        Row(4, {EXPERTS: 2, TP: 2, REPLICAS: 2, FSDP: 1, **GPT_OSS, **GRAPH}),
        1,
    ),
}
#: Chunks, a block without RoPE, factors that grow with the position, a sigmoid, a dense block.
LLAMA4 = {
    "model.name": "llama4",
    "model.overrides.ffn_dim": 96,
    "model.overrides.expert_width": 48,
    "model.overrides.n_experts": 4,
    "model.overrides.sparse_step": 2,
    "model.overrides.nope_every": 2,
    "model.overrides.chunk": 12,
    "model.overrides.temperature": 0.4,
    "model.overrides.temperature_floor": 8,
    "model.overrides.aux_loss": 0.0,
}
MORE |= {
    "llama4, 1 rank": (Row(1, LLAMA4), 2),
    "llama4, fsdp 2, by operation, compiled": (Row(2, {FSDP: 2, **LLAMA4, **GRAPH}), 1),
    "llama4, hsdp 2 x 2": (Row(4, {REPLICAS: 2, FSDP: 2, **LLAMA4}), 1),
    "llama4, cp 2": (Row(2, {CP: 2, **LLAMA4}), 1),
    "llama4, cp 2, tp 2, by operation, compiled": (Row(4, {CP: 2, TP: 2, **LLAMA4, **GRAPH}), 1),
    "llama4, pp 2, chunks": (Row(2, {PP: 2, CHUNKS: 3, **LLAMA4, **FOUR}), 2),
    "llama4, tp 2": (Row(2, {TP: 2, **LLAMA4}), 2),
    "llama4, ep 2": (Row(2, {EXPERTS: 2, **LLAMA4}), 2),
    "llama4, ep 2, fsdp 4, recomputed": (Row(4, {EXPERTS: 2, MODE: "full", **LLAMA4}), 1),
    "llama4, ep 4 over tp 2, fsdp 2": (Row(4, {EXPERTS: 4, TP: 2, FSDP: 2, **LLAMA4}), 2),
}
#: Whole QK norm, norms after, windows in two of three blocks; norms around, two bases of RoPE.
OLMO2 = {"model.name": "olmo2"}
OLMO3 = {"model.name": "olmo3", "model.overrides.window": 12, "model.overrides.full_every": 2}
GEMMA3 = {
    "model.name": "gemma3",
    "model.overrides.window": 12,
    "model.overrides.full_every": 2,
    "model.overrides.head_dim": 32,
    "model.overrides.query_scalar": 24,
    "model.overrides.local_theta": 100.0,
}
MORE |= {
    "olmo2, fsdp 2, by operation, compiled": (Row(2, {FSDP: 2, **OLMO2, **GRAPH}), 1),
    "olmo2, tp 2": (Row(2, {TP: 2, **OLMO2}), 2),
    "olmo2, tp 2, fsdp 2, recomputed, compiled": (
        Row(4, {TP: 2, FSDP: 2, MODE: "full", "training.compile": "true", **OLMO2}),
        1,
    ),
    "olmo2, pp 2, tp 2": (Row(4, {PP: 2, TP: 2, **OLMO2, **FOUR}), 2),
    "olmo3, hsdp 2 x 2": (Row(4, {REPLICAS: 2, FSDP: 2, **OLMO3}), 1),
    "olmo3, tp 2": (Row(2, {TP: 2, **OLMO3, **BY_OPERATION}), 1),
    "olmo3, cp 2": (Row(2, {CP: 2, **OLMO3}), 1),
    "olmo3, pp 2": (Row(2, {PP: 2, **OLMO3, **FOUR}), 2),
    "olmo3, cp 2, tp 2, compiled": (Row(4, {CP: 2, TP: 2, **OLMO3, **GRAPH}), 1),
    "gemma3, fsdp 2, recomputed, compiled": (
        Row(2, {FSDP: 2, MODE: "full", "training.compile": "true", **GEMMA3}),
        2,
    ),
    "gemma3, tp 2": (Row(2, {TP: 2, **GEMMA3}), 1),
    "gemma3, cp 2": (Row(2, {CP: 2, **GEMMA3}), 2),
    "gemma3, pp 2, untied": (
        Row(2, {PP: 2, **GEMMA3, "model.overrides.tied": "false", **FOUR}),
        2,
    ),
    "chunks, gemma3, tp 2": (Row(2, {CHUNKS: 3, TP: 2, **GEMMA3}), 1),
}
#: Latent attention with values narrower than queries; a dense first block, then groups of experts.
DEEPSEEK = {
    "model.name": "deepseek_v3",
    "model.overrides.n_kv_heads": 4,
    "model.overrides.ffn_dim": 96,
    "model.overrides.q_lora_rank": 48,
    "model.overrides.kv_lora_rank": 32,
    "model.overrides.qk_nope_head_dim": 16,
    "model.overrides.qk_rope_head_dim": 8,
    "model.overrides.v_head_dim": 12,
    "model.overrides.score": "sigmoid",
    "model.overrides.norm_topk": "true",
    "model.overrides.expert_width": 48,
    "model.overrides.n_groups": 4,
    "model.overrides.top_groups": 2,
    "model.overrides.route_scale": 2.5,
}
NO_QUERY_LATENT = {"model.overrides.q_lora_rank": 0}
MORE |= {
    "deepseek_v3, 1 rank": (Row(1, {**DEEPSEEK}), 2),
    "deepseek_v3, fsdp 2, by operation, compiled": (Row(2, {FSDP: 2, **DEEPSEEK, **GRAPH}), 1),
    "deepseek_v3, hsdp 2 x 2": (Row(4, {REPLICAS: 2, FSDP: 2, **DEEPSEEK}), 1),
    "deepseek_v3, tp 2": (Row(2, {TP: 2, **DEEPSEEK}), 2),
    "deepseek_v3, tp 2, no latent of queries, recomputed, compiled": (
        Row(2, {TP: 2, MODE: "full", "training.compile": "true", **DEEPSEEK, **NO_QUERY_LATENT}),
        1,
    ),
    "deepseek_v3, tp 2, fsdp 2": (Row(4, {TP: 2, FSDP: 2, **DEEPSEEK}), 1),
    "deepseek_v3, cp 2": (Row(2, {CP: 2, **DEEPSEEK, **NO_QUERY_LATENT}), 1),
    "deepseek_v3, pp 2": (Row(2, {PP: 2, **DEEPSEEK, **FOUR}), 2),
    "deepseek_v3, pp 2, tp 2": (Row(4, {PP: 2, TP: 2, **DEEPSEEK, **FOUR}), 2),
    "deepseek_v3, ep 2": (Row(2, {EP: 2, FSDP: 2, **DEEPSEEK}), 2),
    "deepseek_v3, ep 2, fsdp 2, recomputed": (
        Row(4, {EP: 2, FSDP: 4, MODE: "full", **DEEPSEEK}),
        1,
    ),
    "deepseek_v3, ep 2 over tp 2": (Row(2, {EP: 2, TP: 2, **DEEPSEEK}), 2),
    "deepseek_v3, ep 4 over tp 2, cp 2, recomputed": (
        Row(4, {EP: 4, TP: 2, CP: 2, MODE: "full", **DEEPSEEK, **NO_QUERY_LATENT}),
        1,
    ),
    "deepseek_v3, chunks, ep 2": (Row(2, {CHUNKS: 3, EP: 2, FSDP: 2, **DEEPSEEK}), 1),
}
#: An MoE layer in every block and a dense one between them; each token goes to three experts.
QWEN3_MOE = {
    "model.name": "qwen3_moe",
    "model.overrides.head_dim": 32,
    "model.overrides.ffn_dim": 96,
    "model.overrides.expert_width": 48,
    "model.overrides.n_experts": 8,
    "model.overrides.top_k": 3,
    "model.overrides.aux_loss": 0.0,
}
EVERY_2ND = {"model.overrides.sparse_step": 2, "model.overrides.norm_topk": "false"}
MORE |= {
    "qwen3_moe, 1 rank": (Row(1, {**QWEN3_MOE, **EVERY_2ND}), 2),
    "qwen3_moe, fsdp 2": (Row(2, {FSDP: 2, **QWEN3_MOE}), 2),
    "qwen3_moe, cp 2": (Row(2, {CP: 2, **QWEN3_MOE, **EVERY_2ND}), 1),
    "qwen3_moe, pp 2": (Row(2, {PP: 2, **QWEN3_MOE, **EVERY_2ND, **FOUR}), 2),
    "qwen3_moe, ep 2": (Row(2, {EP: 2, FSDP: 2, **QWEN3_MOE}), 2),
    "qwen3_moe, tp 2": (Row(2, {TP: 2, **QWEN3_MOE}), 2),
    "qwen3_moe, tp 2, fsdp 2, recomputed": (
        Row(4, {TP: 2, FSDP: 2, MODE: "full", **QWEN3_MOE, **EVERY_2ND}),
        1,
    ),
    "qwen3_moe, pp 2, tp 2, compiled": (
        Row(4, {PP: 2, TP: 2, **QWEN3_MOE, **GRAPH, **FOUR}),
        2,
    ),
    "qwen3_moe, cp 2, tp 2": (Row(4, {CP: 2, TP: 2, **QWEN3_MOE}), 1),
    "qwen3_moe, ep 2 over tp 2, fsdp 2": (Row(4, {EP: 2, TP: 2, FSDP: 2, **QWEN3_MOE}), 2),
    "qwen3_moe, ep 2 over tp 2, pp 2": (
        Row(4, {EP: 2, TP: 2, PP: 2, **QWEN3_MOE, **EVERY_2ND, **FOUR}),
        2,
    ),
    "qwen3_moe, ep 4 over tp 2, hsdp 2 x 2": (
        Row(8, {EP: 4, TP: 2, REPLICAS: 2, FSDP: 2, **QWEN3_MOE}),
        1,
    ),
    "qwen3_moe, ep 2, fsdp 2, recomputed": (
        Row(4, {EP: 2, FSDP: 4, MODE: "full", **QWEN3_MOE}),
        1,
    ),
}
#: Scalings of RoPE for sequences of SEQ tokens, twice the original length.
YARN = '{rope_type = "yarn", factor = 4, original_max_position_embeddings = 16}'
SCALING = "model.rope_scaling"
MORE |= {
    "yarn, tp 2": (Row(2, {TP: 2, SCALING: YARN}), 1),
    "yarn, cp 2, tp 2": (Row(4, {CP: 2, TP: 2, SCALING: YARN}), 1),
    "yarn, pp 2, compiled": (
        Row(2, {PP: 2, SCALING: YARN, "training.compile": "true", **FOUR}),
        2,
    ),
}
#: Those of `./run_tests.sh`.
QUICK_MORE = {
    "1 rank",
    "fsdp 2, units by size",
    "chunks, fsdp 2, freed, tied",
    "chunks, tp 2",
    "mistral, cp 2",
    "gpt_oss, ep 2",
    "llama4, cp 2",
    "olmo3, cp 2",
    "deepseek_v3, 1 rank",
    "qwen3_moe, 1 rank",
}

COLUMNS = {
    # SGD adds no rounding of its own, so weights are held to 1e-6.
    "at once": Column(1, "SGD", {}),
    "accumulated": Column(2, "AdamW", {}),
    "recomputed": Column(2, "AdamW", {MODE: "full"}),
    "every 2nd recomputed": Column(1, "SGD", {MODE: "selective", OPTION: "2"}),
    "by operation": Column(2, "AdamW", BY_OPERATION),
    "compiled": Column(2, "AdamW", {"training.compile": "true"}),
    "compiled, by operation": Column(1, "SGD", {"training.compile": "true", **BY_OPERATION}),
}

#: Schedules whose stages are those of another row.
SELDOM = ("pp 2, GPipe", "pp 2, LoopedBFS")
#: Cells of `./run_tests.sh`: every kind of parallelism, every column (the compiled one in
#: `MASKED`). The whole table is in `--full`, but for graphs of four ranks without the policy by
#: operation, and for what each rank does anew under `SELDOM`: `--soak` has them.
QUICK = {
    ("fsdp 2", "at once"),
    ("hsdp 2 x 2", "every 2nd recomputed"),
    ("ddp 2", "recomputed"),
    ("tp 2, fsdp 2", "by operation"),
    ("cp 2", "accumulated"),
    ("pp 2, 1F1B", "at once"),
    ("pp 2, ZBVZeroBubble", "accumulated"),
}

#: Cells that the config refuses, and what it says.
REFUSED = {
    (row, column): "run again only once" if column == "by operation" else "would run twice or fail"
    for row in ("pp 2, InterleavedZeroBubble", "pp 2, ZBVZeroBubble")
    for column in ("by operation", "compiled", "compiled, by operation")
}


def config_of(row: Row, column: Column) -> RunConfig:
    """What the config makes of a cell. Raises ConfigError."""
    data_ranks = row.ranks // (row.flags.get(TP, 1) * row.flags.get(CP, 1) * row.flags.get(PP, 1))
    batch = {"training.batch_size": GLOBAL_BATCH // data_ranks // column.accumulation}
    flags = {**SHARED, **batch, **row.flags, **column.flags}
    return load_config(
        "debug_model.toml", row.ranks, [f"--{key}={value}" for key, value in flags.items()]
    )


def run_of(config: RunConfig, optimizer: str = "AdamW", steps: int = 4) -> Run:
    """The cell on dumped batches."""
    mesh, batch = config.mesh, config.batch
    run = Run(
        TOKENS,
        LABELS,
        (FLAT if optimizer == "SGD" else WARM)[:steps],
        family=config.model.name,
        args=config.model_args(),
        training=config.training,
        optimizer=optimizer,
        accumulation=batch.accumulation,
        replicas=mesh.dp_replicate,
        activations=config.activation_checkpoint,
        compile=config.compile if config.training.compile else None,
        tensor=mesh.tensor,
        loss_parallel=config.training.enable_loss_parallel,
        context=mesh.context,
        pipeline=mesh.pipeline,
        schedule=config.experimental.pipeline_parallel_schedule,
        split_points=tuple(config.experimental.pipeline_parallel_split_points),
        pieces=config.experimental.pipeline_parallel_microbatches or mesh.pipeline,
        loss_chunks=config.training.loss_chunks,
        expert=mesh.expert,
    )
    degrees = (mesh.dp_replicate, mesh.dp_shard, mesh.context, mesh.tensor, mesh.pipeline)
    assert run.mesh(mesh.world_size) == Degrees(*degrees)
    assert (
        batch.global_batch_size
        == GLOBAL_BATCH
        == batch.micro_batch_size * batch.accumulation * mesh.dp_degree
    )
    return run


def _tier(row: str, column: str) -> list[pytest.MarkDecorator]:
    if (row, column) in QUICK:
        return []
    seldom = (
        ROWS[row].ranks == 4
        if column == "compiled"
        else row in SELDOM and column not in ("at once", "accumulated")
    )
    return [pytest.mark.soak if seldom else pytest.mark.slow]


#: Rows with masks between documents, each with a column: what reaches attention, positions and
#: recomputation.
MASKED = {
    "fsdp 2": "compiled, by operation",
    "tp 2": "by operation",
    "cp 2": "accumulated",
    "pp 2, 1F1B": "accumulated",
    "pp 2, ZBVZeroBubble": "at once",
    "tp 2, fsdp 2": "compiled",
    "cp 2, fsdp 2": "compiled, by operation",
    "pp 2, tp 2": "accumulated",
    "pp 2, cp 2": "accumulated",
    "cp 2, tp 2": "recomputed",
    "mistral, tp 2": "by operation",
    "mistral, cp 2": "compiled",
    "gpt_oss, 1 rank": "at once",
    "gpt_oss, cp 2": "recomputed",
    "gpt_oss, tp 2": "by operation",
    "llama4, 1 rank": "at once",
    "llama4, cp 2": "recomputed",
    "llama4, tp 2": "by operation",
    "llama4, pp 2, chunks": "at once",
    "llama4, ep 2": "recomputed",
    "gpt_oss, ep 2 over tp 2": "by operation",
    "llama4, ep 4 over tp 2, fsdp 2": "recomputed",
    "olmo3, cp 2": "accumulated",
    "olmo3, tp 2": "at once",
    "gemma3, tp 2": "compiled",
    "deepseek_v3, tp 2": "by operation",
    "deepseek_v3, cp 2": "compiled",
    "pp 2, tp 2, cp 2": "at once",
}
QUICK_MASKED = {"fsdp 2", "cp 2"}


def grid_on(*ranks: int) -> tuple[Any, ...]:
    """Make the tests of all rows on these numbers of ranks: cells, other rows, masked documents,
    bf16.
    """
    rows = {**{name: (row, 2) for name, row in ROWS.items()}, **MORE}
    assert {row.ranks for row, _ in rows.values()} <= {1, 2, 4, 8}, "no file would run the others"
    here = {name: pair for name, pair in rows.items() if pair[0].ranks in ranks}

    def some(names: Any, quick: Any = ()) -> Any:
        chosen = [name for name in names if name in here]
        return pytest.mark.parametrize(
            "row",
            [
                pytest.param(name, marks=[] if name in quick else pytest.mark.slow)
                for name in chosen
            ],
        )

    @pytest.mark.parametrize(
        ("row", "column"),
        [
            pytest.param(row, column, id=f"{row} - {column}", marks=_tier(row, column))
            for row in ROWS
            for column in COLUMNS
            if row in here and (row, column) not in REFUSED
        ],
    )
    def cell(references: References, row: str, column: str) -> None:
        """Gradients of every parameter, losses and norms of each step, weights after the last, as
        in `transformers`.
        """
        done = COLUMNS[column]
        # Twenty steps of AdamW in one cell: longer runs of the others would show nothing that this
        # does not.
        steps = 20 if (row, column) == ("cp 2", "accumulated") else 4
        references.compare(
            run_of(config_of(ROWS[row], done), done.optimizer, steps), ROWS[row].ranks
        )

    @some(MORE, QUICK_MORE)
    def other(references: References, row: str) -> None:
        split, accumulation = MORE[row]
        references.compare(run_of(config_of(split, Column(accumulation, "AdamW", {}))), split.ranks)

    @some(MASKED, QUICK_MASKED)
    def masked(references: References, row: str) -> None:
        """Held against `transformers` with each document in a row of its own."""
        split = rows[row][0]
        column = COLUMNS[MASKED[row]]
        references.compare(
            replace(run_of(config_of(split, column), column.optimizer), documents=DOCUMENTS),
            split.ranks,
        )

    @some(ROWS)
    def bf16(references: References, row: str) -> None:
        """Mean distance of the losses from those on one rank: at most twice what another seed makes
        of them.
        """
        low = replace(
            ROWS[row], flags={**ROWS[row].flags, "training.mixed_precision_param": "bfloat16"}
        )
        run = run_of(config_of(low, COLUMNS["accumulated"]), steps=8)
        assert run.training.mixed_precision_param == "bfloat16"
        plain, *others = map(torch.tensor, references.seeds(run))
        spread = torch.stack([(plain - other).abs().mean() for other in others]).mean()
        distance = (torch.tensor(references.losses(run, low.ranks)) - plain).abs().mean()
        assert distance < 2 * spread, (distance, spread)

    return cell, other, masked, bf16
