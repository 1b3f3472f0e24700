"""Every way to divide the work, times every way to save memory and time: one table.

A cell is a config: flags as a user gives them, over the default TOML. What the config takes trains as `transformers`
does on one process; what it refuses is refused with its reason.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from tests.pool import Pools
from tests.training.compare import FLAT, GLOBAL_BATCH, LABELS, SEQ, TOKENS, WARM, References
from tests.training.harness import Run, train
from titanlite.config.errors import ConfigError
from titanlite.config.pipeline import SCHEDULES
from titanlite.config.plans import Plans
from titanlite.prepare import load_plans, model_args

#: Two blocks of grouped queries, as small as four ranks can share.
MODEL = {"dim": 64, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "multiple_of": 32, "max_seq_len": 64}
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
    #: What a rank does anew shows in the first steps already.
    steps: int = 20


#: Rows beside the product, with micro-batches per step.
MORE = {
    "1 rank": (Row(1, {}), 1),
    "1 rank, four micro-batches": (Row(1, {}), 4),
    "fsdp 2, freed": (Row(2, {FSDP: 2, RESHARD: "always", "training.prefetch": 1}), 2),
    "fsdp 2, four micro-batches reduced each": (Row(2, {FSDP: 2, SYNC: "every"}), 4),
    "fsdp 4, over 2": (Row(4, {FSDP: 4, RESHARD: 2}), 2),
    "tp 2, whole logits": (Row(2, {TP: 2, LOSS_PARALLEL: "false"}), 2),
    "tp 2, ddp 2": (Row(4, {TP: 2, REPLICAS: 2, FSDP: 1}), 2),
    "tp 2, fsdp 2, freed": (Row(4, {TP: 2, FSDP: 2, RESHARD: "always", "training.prefetch": 1}), 2),
    "tp 2, fsdp 2, reduced with each": (Row(4, {TP: 2, FSDP: 2, SYNC: "every"}), 2),
    "tp 2, tied": (Row(2, {TP: 2, "model.overrides.tied": "true"}), 2),
    "tp 2, fsdp 2, tied": (Row(4, {TP: 2, FSDP: 2, "model.overrides.tied": "true"}), 2),
    "cp 4": (Row(4, {CP: 4}), 2),
    "cp 2, reduced with each": (Row(2, {CP: 2, SYNC: "every"}), 2),
    "cp 2, tied": (Row(2, {CP: 2, "model.overrides.tied": "true"}), 2),
    "cp 2, one unit": (Row(2, {CP: 2, "training.fsdp_units": "root"}), 2),
    "cp 2, fsdp 2, over 2": (Row(4, {CP: 2, FSDP: 2, RESHARD: 2, "training.prefetch": 1}), 2),
    "cp 2, ddp 2": (Row(4, {CP: 2, REPLICAS: 2, FSDP: 1}), 2),
    "cp 2, tp 2": (Row(4, {CP: 2, TP: 2}), 2),
    "pp 4": (Row(4, {PP: 4, **FOUR}), 2),
    "pp 4, stages without blocks": (Row(4, {PP: 4, SPLIT: '["layers.0","norm","output"]', **FOUR}), 2),
    "pp 2, fsdp 2, gathered again": (Row(4, {PP: 2, FSDP: 2, RESHARD: "always", **FOUR}), 2),
    "pp 2, fsdp 2, zero bubble": (Row(4, {PP: 2, FSDP: 2, SCHEDULE: "ZBVZeroBubble", **FOUR}), 2),
    "pp 2, ddp 2": (Row(4, {PP: 2, REPLICAS: 2, FSDP: 1, **FOUR}), 2),
    "pp 2, tp 2, zero bubble, whole logits": (
        Row(4, {PP: 2, TP: 2, LOSS_PARALLEL: "false", SCHEDULE: "ZBVZeroBubble", **FOUR}),
        2,
    ),
    "pp 2, cp 2": (Row(4, {PP: 2, CP: 2, **FOUR}), 2),
    "pp 2, tp 2, fsdp 2": (Row(8, {PP: 2, TP: 2, FSDP: 2, **FOUR}), 2),
    "pp 2, tp 2, cp 2": (Row(8, {PP: 2, TP: 2, CP: 2, SCHEDULE: "Interleaved1F1B", **FOUR}), 2),
    "cp 2, tp 2, fsdp 2, recomputed": (Row(8, {CP: 2, TP: 2, FSDP: 2, "activation_checkpoint.mode": "full"}), 1),
}

MODE, OPTION = "activation_checkpoint.mode", "activation_checkpoint.selective_ac_option"
BY_OPERATION = {MODE: "selective", OPTION: "op"}
COLUMNS = {
    # SGD adds no rounding of its own, so weights are held to 1e-6.
    "at once": Column(1, "SGD", {}),
    "accumulated": Column(2, "AdamW", {}),
    "recomputed": Column(2, "AdamW", {MODE: "full"}, steps=4),
    "every 2nd recomputed": Column(1, "SGD", {MODE: "selective", OPTION: "2"}, steps=4),
    "by operation": Column(2, "AdamW", BY_OPERATION, steps=4),
    "compiled": Column(2, "AdamW", {"training.compile": "true"}, steps=4),
    "compiled, by operation": Column(1, "SGD", {"training.compile": "true", **BY_OPERATION}, steps=4),
}

#: Cells of `./run_tests.sh`: every kind of row, every column. The whole table is in `--soak`.
QUICK = {
    ("fsdp 2", "at once"),
    ("fsdp 2", "compiled, by operation"),
    ("fsdp 4", "accumulated"),
    ("hsdp 2 x 2", "every 2nd recomputed"),
    ("ddp 2", "recomputed"),
    ("tp 2", "compiled"),
    ("tp 2, fsdp 2", "by operation"),
    ("cp 2", "accumulated"),
    ("cp 2, fsdp 2", "recomputed"),
    ("pp 2, 1F1B", "at once"),
    ("pp 2, ZBVZeroBubble", "accumulated"),
    ("pp 2, fsdp 2", "accumulated"),
    ("pp 2, tp 2", "accumulated"),
}

#: Of the rows beside the product, those of --full.
SLOW = {"fsdp 2, freed", "tp 2, tied", "cp 2, tp 2", "pp 2, cp 2", "pp 2, fsdp 2, zero bubble"}

ZERO_BUBBLE = ("pp 2, InterleavedZeroBubble", "pp 2, ZBVZeroBubble")
#: Cells that the config refuses: what it says, and the key that it blames.
REFUSED = {
    **{(row, "by operation"): (SCHEDULE, "run again only once") for row in ZERO_BUBBLE},
    **{(row, "compiled"): (SCHEDULE, "would run twice or fail") for row in ZERO_BUBBLE},
    **{(row, "compiled, by operation"): (SCHEDULE, "would run twice or fail") for row in ZERO_BUBBLE},
}


def plans_of(row: Row, column: Column) -> Plans:
    """What the config makes of a cell. Raises ConfigError."""
    data_ranks = row.ranks // (row.flags.get(TP, 1) * row.flags.get(CP, 1) * row.flags.get(PP, 1))
    batch = {"training.batch_size": GLOBAL_BATCH // data_ranks // column.accumulation}
    flags = {**SHARED, **batch, **row.flags, **column.flags}
    return load_plans("debug_model.toml", row.ranks, [f"--{key}={value}" for key, value in flags.items()])


def run_of(plans: Plans, optimizer: str = "AdamW", steps: int = 20) -> Run:
    """The cell on dumped batches."""
    mesh = plans.mesh
    run = Run(
        TOKENS,
        LABELS,
        (FLAT if optimizer == "SGD" else WARM)[:steps],
        args=model_args(plans.model),
        shard=plans.shard,
        optimizer=optimizer,
        accumulation=plans.batch.accumulation,
        replicas=mesh.dp_replicate,
        activations=plans.activations,
        compile=plans.compile,
        tensor=mesh.tensor,
        loss_parallel=plans.tensor_parallel.loss_parallel,
        context=mesh.context,
        pipeline=mesh.pipeline,
        schedule=plans.pipeline.schedule,
        split_points=plans.pipeline.split_points,
        pieces=plans.pipeline.microbatches,
    )
    assert run.mesh(mesh.world_size) == mesh and run.batch(mesh.world_size) == plans.batch
    assert mesh.pipeline == 1 or run.pipeline_plan() == plans.pipeline
    return run


CELLS = [
    pytest.param(row, column, id=f"{row} - {column}", marks=[] if (row, column) in QUICK else pytest.mark.soak)
    for row in ROWS
    for column in COLUMNS
    if (row, column) not in REFUSED
    # Four ranks take long to compile, and do so with the policy by operation.
    and (ROWS[row].ranks < 4 or column != "compiled")
]


@pytest.mark.parametrize(("row", "column"), CELLS)
def test_a_cell_trains_as_transformers_does(references: References, row: str, column: str) -> None:
    """Gradients of every parameter, losses and norms of each step, weights after the last."""
    cell = COLUMNS[column]
    references.compare(run_of(plans_of(ROWS[row], cell), cell.optimizer, cell.steps), ROWS[row].ranks)


def _mark(name: str) -> list[pytest.MarkDecorator]:
    return [] if name == "1 rank" else [pytest.mark.slow if name in SLOW else pytest.mark.soak]


@pytest.mark.parametrize(
    ("row", "accumulation"),
    [pytest.param(*cell, id=name, marks=_mark(name)) for name, cell in MORE.items()],
)
def test_another_row_trains_as_transformers_does(references: References, row: Row, accumulation: int) -> None:
    references.compare(run_of(plans_of(row, Column(accumulation, "AdamW", {})), steps=8), row.ranks)


@pytest.mark.parametrize(("row", "column"), REFUSED, ids=map(" - ".join, REFUSED))
def test_a_cell_that_cannot_work_is_refused(row: str, column: str) -> None:
    key, reason = REFUSED[row, column]
    with pytest.raises(ConfigError) as caught:
        plans_of(ROWS[row], COLUMNS[column])
    assert [problem.key for problem in caught.value.problems].count(key) == len(caught.value.problems)
    assert reason in caught.value.problems[0].message


@pytest.fixture(scope="module")
def bf16_alone(pool: Pools) -> dict[int, list[list[float]]]:
    """Losses of bf16 runs on one rank, by number of blocks and seed; filled as they are needed."""
    return {}


@pytest.mark.parametrize(
    "row", [name if name in ("fsdp 2", "tp 2") else pytest.param(name, marks=pytest.mark.soak) for name in ROWS]
)
def test_bf16_stays_within_the_spread_of_seeds(pool: Pools, bf16_alone: dict[int, list[list[float]]], row: str) -> None:
    """Mean distance of the losses from those on one rank: at most twice what another seed makes of them."""
    low = replace(ROWS[row], flags={**ROWS[row].flags, "training.mixed_precision_param": "bfloat16"})
    run = run_of(plans_of(low, COLUMNS["accumulated"]), steps=8)
    assert run.shard.param_dtype == "bfloat16"
    blocks = run.args.n_layers
    if blocks not in bf16_alone:
        alone = run.alone()
        bf16_alone[blocks] = [pool(1).run(train, replace(alone, seed=seed))[0].losses for seed in (7, 8, 9)]
    plain, *others = map(torch.tensor, bf16_alone[blocks])
    spread = torch.stack([(plain - other).abs().mean() for other in others]).mean()
    ours = torch.tensor(pool(low.ranks).run(train, run)[0].losses)
    assert (ours - plain).abs().mean() < 2 * spread
