"""Every way to divide the work, times every way to save memory and time: one table.

A cell is a config: flags as a user gives them, over the default TOML. What the config takes trains
as `transformers` does on one process, or a module in plain torch (`REFERENCES`); what it refuses is
refused with its reason. test_grid.py runs the cells on one and two ranks,
test_grid_of_four_ranks.py the others, so that processes share the work. The name of a row says
all of it: each of its words stands in `FAMILIES`, `DEGREES` or `WORDS`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest

from tests.support.compare import (
    DOCUMENTS,
    GLOBAL_BATCH,
    LABELS,
    SEQ,
    TOKENS,
    WARM,
    Reference,
    References,
    distance,
    spread,
)
from tests.support.harness import Run
from tests.support.plain_llama import PlainLlama
from titanlite.parallel.schedules import SCHEDULES
from titanlite.resolve.load import load_config
from titanlite.run.config import RunConfig


def overrides(**sizes: Any) -> dict[str, Any]:
    return {f"model.overrides.{key}": value for key, value in sizes.items()}


SHARED = {
    # Two blocks of grouped queries, as small as four ranks can share.
    **overrides(dim=64, n_layers=2, n_heads=4, n_kv_heads=2, multiple_of=32, max_seq_len=64),
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
SCHEDULE = "experimental.pipeline_parallel_schedule"
MODE = "activation_checkpoint.mode"
OPTION = "activation_checkpoint.selective_ac_option"
COMPILE = "training.compile"
UNITS = "training.fsdp_units"
CHUNKS = "training.loss_chunks"
PREFETCH = "training.prefetch"
SCALING = "model.rope_scaling"
BY_OPERATION = {MODE: "selective", OPTION: "op"}

#: Latent attention with values narrower than queries; a dense first block, then groups of experts.
DEEPSEEK = {
    "model.name": "deepseek_v3",
    **overrides(
        n_kv_heads=4,
        ffn_dim=96,
        q_lora_rank=48,
        kv_lora_rank=32,
        qk_nope_head_dim=16,
        qk_rope_head_dim=8,
        v_head_dim=12,
        score="sigmoid",
        norm_topk="true",
        expert_width=48,
        n_groups=4,
        top_groups=2,
        route_scale=2.5,
    ),
}
FAMILIES = {
    # A window shorter than the sequence.
    "mistral": overrides(window=12),
    # QK norm, with heads wider than dim / heads.
    "qwen3": overrides(head_dim=32, tied="false"),
    # Sinks, biases, experts, a window in every second block.
    "gpt_oss": overrides(head_dim=16, ffn_dim=48, n_experts=4, top_k=2, window=12, aux_loss=0.0),
    # Chunks, a block without RoPE, factors that grow with the position, a sigmoid, a dense block.
    "llama4": overrides(
        ffn_dim=96,
        expert_width=48,
        n_experts=4,
        sparse_step=2,
        nope_every=2,
        chunk=12,
        temperature=0.4,
        temperature_floor=8,
        aux_loss=0.0,
    ),
    # Whole QK norm, norms after; windows in two of three blocks; norms around, two bases of RoPE.
    "olmo2": {},
    "olmo3": overrides(window=12, full_every=2),
    "gemma3": overrides(window=12, full_every=2, head_dim=32, query_scalar=24, local_theta=100.0),
    "deepseek_v3": DEEPSEEK,
    # An MoE layer in every block; each token goes to three experts.
    "qwen3_moe": overrides(
        head_dim=32, ffn_dim=96, expert_width=48, n_experts=8, top_k=3, aux_loss=0.0
    ),
}
DEGREES = {
    "fsdp": (FSDP, {}),
    "replicas": (REPLICAS, {}),
    "ddp": (REPLICAS, {FSDP: 1}),
    "tp": (TP, {}),
    "cp": (CP, {}),
    # A pipeline cuts four blocks, two for each of two ranks.
    "pp": (PP, overrides(n_layers=4)),
    "ep": (EP, {}),
}
WORDS: dict[str, dict[str, Any]] = {
    "1 rank": {},
    "recomputed": {MODE: "full"},
    "every 2nd recomputed": {MODE: "selective", OPTION: "2"},
    "by operation": BY_OPERATION,
    "compiled": {COMPILE: "true"},
    "loss compiled": {COMPILE: "true", "compile.components": '["loss"]'},
    # The plain backends do not divide a graph by a budget; this one divides it as inductor does,
    # and builds no code.
    "budget": {
        COMPILE: "true",
        "compile.backend": "aot_eager_decomp_partition",
        MODE: "budget",
        "activation_checkpoint.memory_budget": 0.3,
    },
    "freed": {RESHARD: "always", PREFETCH: 1},
    "gathered again": {RESHARD: "always"},
    "over 2": {RESHARD: 2, PREFETCH: 1},
    "reduced with each": {"training.gradient_sync": "every"},
    "whole logits": {"training.enable_loss_parallel": "false"},
    "tied": overrides(tied="true"),
    "untied": overrides(tied="false"),
    "units of blocks": {UNITS: '["Block"]', PREFETCH: 1},
    "units of classes": {UNITS: '["Block","Embedding"]', PREFETCH: 2},
    "units in blocks": {UNITS: '["Block","Attention"]'},
    "one unit": {UNITS: "root"},
    "stages without blocks": {
        "experimental.pipeline_parallel_split_points": '["layers.0","norm","output"]'
    },
    **{name: {SCHEDULE: name} for name in SCHEDULES},
    # The loss in chunks, also more than the tokens need.
    "chunks": {CHUNKS: 3},
    "many chunks": {CHUNKS: 100},
    # A scaling of RoPE for sequences of SEQ tokens, twice the original length.
    "yarn": {SCALING: '{rope_type = "yarn", factor = 4, original_max_position_embeddings = 16}'},
    "no latent of queries": overrides(q_lora_rank=0),
    "a dense block": overrides(sparse_step=2, norm_topk="false"),
    "by formulas": {},
}
#: Words of rows that are held against plain torch: what `transformers` lacks.
REFERENCES: dict[str, Reference] = {"by formulas": PlainLlama}


def flags_of(row: str) -> dict[str, Any]:
    """The flags that the words of a row's name mean."""
    flags: dict[str, Any] = {}
    for word in row.split(", "):
        kind, _, number = word.partition(" ")
        if word in FAMILIES:
            flags |= {"model.name": word, **FAMILIES[word]}
        elif word in WORDS:
            flags |= WORDS[word]
        else:
            degree, more = DEGREES[kind]
            flags |= {degree: int(number), **more}
    return flags


def reference_of(row: str) -> Reference | None:
    return next((REFERENCES[word] for word in row.split(", ") if word in REFERENCES), None)


def ranks_of(row: str) -> int:
    flags = flags_of(row)
    return math.prod(flags.get(degree, 1) for degree in (FSDP, REPLICAS, TP, CP, PP))


@dataclass(frozen=True)
class Column:
    """What each rank does with its part."""

    accumulation: int
    optimizer: str
    flags: dict[str, Any]


#: Learning rates of three steps. The weights after them show the moments of all three.
SHORT = {"AdamW": [1e-3, 2e-3, 3e-3], "SGD": [0.4 / 3] * 3}

COLUMNS = {
    # SGD adds no rounding of its own, so weights are held to 1e-6.
    "at once": Column(1, "SGD", {}),
    "accumulated": Column(2, "AdamW", {}),
    "recomputed": Column(2, "AdamW", WORDS["recomputed"]),
    "every 2nd recomputed": Column(1, "SGD", WORDS["every 2nd recomputed"]),
    "by operation": Column(2, "AdamW", BY_OPERATION),
    "compiled": Column(2, "AdamW", WORDS["compiled"]),
    "compiled, by operation": Column(1, "SGD", {**WORDS["compiled"], **BY_OPERATION}),
}
ROWS = [
    "fsdp 2",
    "fsdp 4",
    "replicas 2, fsdp 2",
    "ddp 2",
    "tp 2",
    "tp 2, fsdp 2",
    "cp 2",
    "cp 2, fsdp 2",
    *(f"pp 2, {name}" for name in SCHEDULES),
    "pp 2, fsdp 2",
    "pp 2, tp 2",
]
#: Cells that the config refuses, and what it says.
REFUSED = {
    (row, column): "run again only once" if column == "by operation" else "would run twice or fail"
    for row in ("pp 2, InterleavedZeroBubble", "pp 2, ZBVZeroBubble")
    for column in ("by operation", "compiled", "compiled, by operation")
}
#: Cells of `./run_tests.sh`: every kind of parallelism, every column (the compiled one in
#: `MASKED`).
QUICK = {
    ("fsdp 2", "at once"),
    ("replicas 2, fsdp 2", "every 2nd recomputed"),
    ("ddp 2", "recomputed"),
    ("tp 2, fsdp 2", "by operation"),
    ("cp 2", "accumulated"),
    ("pp 2, 1F1B", "at once"),
    ("pp 2, ZBVZeroBubble", "accumulated"),
}
#: Columns that `--full` has of all rows: SGD, and on two ranks a graph. AdamW over micro-batches is
#: in the rows of `MORE`, the whole table in `--soak`.
FULL = ("at once", "compiled, by operation")

#: Rows beside the product, of one micro-batch or two. Those of `./run_tests.sh` come first.
QUICK_MORE = {
    "1 rank": 1,
    "fsdp 2, units of blocks": 2,
    "many chunks, fsdp 2, gathered again, tied": 1,
    "chunks, tp 2": 1,
    "mistral, cp 2": 1,
    "gpt_oss, ep 2, fsdp 2": 2,
    "llama4, cp 2": 1,
    "olmo3, cp 2": 1,
    "deepseek_v3, tp 2": 2,
    "qwen3_moe, 1 rank, a dense block": 2,
}
MORE = {
    **QUICK_MORE,
    "by formulas, tp 2, fsdp 2": 2,
    "by formulas, pp 2": 1,
    "fsdp 2, reduced with each": 4,
    "fsdp 4, over 2": 2,
    "fsdp 2, tied, units of classes": 2,
    "fsdp 2, units in blocks, recomputed": 2,
    "fsdp 2, budget": 1,
    "tp 2, recomputed, compiled": 1,
    "tp 2, fsdp 2, freed": 2,
    "tp 2, fsdp 2, tied": 2,
    "cp 4": 2,
    "cp 2, fsdp 2, over 2": 2,
    "cp 2, tp 2, fsdp 2, recomputed": 1,
    "pp 4, stages without blocks": 2,
    "pp 2, fsdp 2, gathered again": 2,
    "pp 2, fsdp 2, ZBVZeroBubble": 2,
    "pp 2, tp 2, ZBVZeroBubble, whole logits": 2,
    "pp 2, tp 2, budget": 1,
    "pp 2, tp 2, cp 2, Interleaved1F1B": 2,
    "chunks, fsdp 2, gathered again, one unit": 2,
    "chunks, tp 2, fsdp 2, whole logits": 1,
    "chunks, pp 2, ZBVZeroBubble, loss compiled": 1,
    "yarn, cp 2, tp 2": 1,
    "mistral, cp 2, tp 2, by operation, compiled": 1,
    "qwen3, tp 2, fsdp 2, tied": 2,
    "qwen3, pp 2, tp 2": 2,
    "gpt_oss, fsdp 2, by operation, compiled": 1,
    "gpt_oss, pp 2, fsdp 2, chunks": 2,
    "gpt_oss, cp 2, tp 2, by operation": 1,
    "gpt_oss, ep 2, tp 2, ddp 2, by operation": 1,
    "llama4, fsdp 2, by operation, compiled": 1,
    "llama4, cp 2, tp 2, by operation": 1,
    "llama4, pp 2, chunks": 2,
    "llama4, ep 4, tp 2, fsdp 2": 2,
    "olmo2, tp 2, fsdp 2, recomputed, compiled": 1,
    "olmo2, pp 2, tp 2": 2,
    "olmo3, pp 2": 2,
    "olmo3, cp 2, tp 2, by operation": 1,
    "gemma3, fsdp 2, recomputed, compiled": 2,
    "gemma3, cp 2": 2,
    "gemma3, pp 2, untied": 2,
    "chunks, gemma3, tp 2": 1,
    "deepseek_v3, fsdp 2, by operation, compiled": 1,
    "deepseek_v3, tp 2, no latent of queries, recomputed, compiled": 1,
    "deepseek_v3, pp 2, tp 2": 2,
    "deepseek_v3, ep 4, tp 2, cp 2, recomputed, no latent of queries": 1,
    "deepseek_v3, chunks, ep 2, fsdp 2": 1,
    "qwen3_moe, tp 2, fsdp 2, recomputed, a dense block": 1,
    "qwen3_moe, pp 2, tp 2, by operation": 2,
    "qwen3_moe, cp 2, tp 2": 1,
    "qwen3_moe, ep 2, tp 2, fsdp 2": 2,
    "qwen3_moe, ep 2, tp 2, pp 2, a dense block": 2,
}
#: Rows with masks between documents, each with a column: what reaches attention, positions and
#: recomputation. Those of `./run_tests.sh` come first.
QUICK_MASKED = {"fsdp 2": "compiled, by operation", "cp 2": "accumulated"}
MASKED = {
    **QUICK_MASKED,
    "tp 2": "by operation",
    "pp 2, 1F1B": "accumulated",
    "cp 2, fsdp 2": "compiled, by operation",
    "pp 2, cp 2": "accumulated",
    "mistral, tp 2": "by operation",
    "mistral, cp 2": "compiled",
    "gpt_oss, cp 2": "recomputed",
    "llama4, cp 2": "recomputed",
    "llama4, tp 2": "by operation",
    "llama4, pp 2, chunks": "at once",
    "olmo3, cp 2": "accumulated",
    "chunks, gemma3, tp 2": "compiled",
    "deepseek_v3, tp 2": "by operation",
    "deepseek_v3, cp 2, no latent of queries": "compiled",
    "pp 2, tp 2, cp 2, Interleaved1F1B": "at once",
}


def config_of(row: str, column: Column) -> RunConfig:
    """What the config makes of a cell. Raises ConfigError."""
    flags = flags_of(row)
    ranks = ranks_of(row)
    data_ranks = ranks // math.prod(flags.get(degree, 1) for degree in (TP, CP, PP))
    batch = {"training.batch_size": GLOBAL_BATCH // data_ranks // column.accumulation}
    every = {**SHARED, **batch, **flags, **column.flags}
    return load_config(
        "debug_model.toml", ranks, [f"--{key}={value}" for key, value in every.items()]
    )


def run_of(
    config: RunConfig, optimizer: str = "AdamW", rates: Sequence[float] | None = None
) -> Run:
    """The cell on dumped batches.

    rates: of each step; None: those of `SHORT`.
    """
    mesh, batch = config.mesh, config.batch
    run = Run(
        TOKENS,
        LABELS,
        list(rates or SHORT[optimizer]),
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
    assert run.mesh(mesh.world_size) == mesh
    assert (
        batch.global_batch_size
        == GLOBAL_BATCH
        == batch.micro_batch_size * batch.accumulation * mesh.dp_degree
    )
    return run


def grid_on(*ranks: int) -> tuple[Any, ...]:
    """Make the tests of all rows on these numbers of ranks: cells, other rows, masked documents,
    bf16.
    """
    assert {ranks_of(row) for row in (*ROWS, *MORE)} <= {1, 2, 4, 8}, "no file would run the others"

    def some(rows: Any, quick: Any = (), most: int = 4) -> Any:
        """Rows; those on more than `most` ranks are of `--soak`."""

        def marked(row: str) -> Any:
            slow = pytest.mark.soak if ranks_of(row) > most else pytest.mark.slow
            return pytest.param(row, marks=[] if row in quick else [slow])

        here = [marked(row) for row in rows if ranks_of(row) in ranks]
        return pytest.mark.parametrize("row", here)

    def tier(row: str, column: str) -> list[pytest.MarkDecorator]:
        if (row, column) in QUICK:
            return []
        seldom = column not in FULL or ("compiled" in column and ranks_of(row) == 4)
        return [pytest.mark.soak if seldom else pytest.mark.slow]

    @pytest.mark.parametrize(
        ("row", "column"),
        [
            pytest.param(row, column, id=f"{row} - {column}", marks=tier(row, column))
            for row in ROWS
            for column in COLUMNS
            if ranks_of(row) in ranks and (row, column) not in REFUSED
        ],
    )
    def cell(references: References, row: str, column: str) -> None:
        """Gradients of every parameter, losses and norms of each step, weights after the last, as
        in `transformers`.
        """
        done = COLUMNS[column]
        # Twenty steps of AdamW in one cell: longer runs of the others would show nothing that this
        # does not.
        rates = WARM if (row, column) == ("cp 2", "accumulated") else None
        references.compare(run_of(config_of(row, done), done.optimizer, rates), ranks_of(row))

    @some(MORE, QUICK_MORE)
    def other(references: References, row: str) -> None:
        column = Column(MORE[row], "AdamW", {})
        references.compare(run_of(config_of(row, column)), ranks_of(row), reference_of(row))

    @some(MASKED, QUICK_MASKED)
    def masked(references: References, row: str) -> None:
        """Held against `transformers` with each document in a row of its own."""
        column = COLUMNS[MASKED[row]]
        run = run_of(config_of(row, column), column.optimizer)
        references.compare(replace(run, documents=DOCUMENTS), ranks_of(row))

    @some(ROWS, most=2)
    def bf16(references: References, row: str) -> None:
        """Mean distance of the losses from those on one rank: at most twice what another seed makes
        of them.
        """
        low = Column(2, "AdamW", {"training.mixed_precision_param": "bfloat16"})
        run = run_of(config_of(row, low), rates=WARM[:8])
        assert run.training.mixed_precision_param == "bfloat16"
        plain, *others = references.seeds(run)
        far = distance(references.losses(run, ranks_of(row)), plain)
        allowed = 2 * spread(plain, others)
        assert far < allowed, (far, allowed)

    return cell, other, masked, bf16
