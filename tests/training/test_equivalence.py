"""Any split of one global batch trains the same model as `transformers` on one process."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.pool import Pools
from tests.training.harness import TINY, Run, batches, initial_weights, train
from tests.training.reference import Curve, train_reference
from titanlite.config.plans import ActivationCheckpointPlan, ShardPlan
from titanlite.models import LlamaArgs, RopeScaling, get_spec

STEPS, GLOBAL_BATCH, SEQ = 20, 8, 32
TOKENS, LABELS = batches(STEPS, GLOBAL_BATCH, SEQ, 192)
WARM = [3e-3 * min(1.0, (n + 1) / 5) for n in range(STEPS)]
SHAPES = {
    "gqa": TINY,
    "tied": replace(TINY, tied=True),
    "scaled-rope": replace(TINY, rope_scaling=RopeScaling(factor=8.0, original_context=16), rope_theta=5e5),
}


def _relative(a: torch.Tensor, b: torch.Tensor) -> float:
    return ((a - b).norm() / b.norm()).item()


def _to_hf(weights: dict[str, torch.Tensor], args: LlamaArgs) -> dict[str, torch.Tensor]:
    return get_spec("llama3").to_hf(weights, args)


@pytest.fixture(scope="module")
def references(pool: Pools) -> dict[tuple[str, str], Curve]:
    """The reference's curves by (shape, optimizer), computed once, and shared by all splits."""
    return {}


def _reference(references: dict[tuple[str, str], Curve], pool: Pools, shape: str, run: Run) -> Curve:
    key = (shape, run.optimizer)
    if key not in references:
        start = pool(1).run(initial_weights, run.alone())[0]
        references[key] = train_reference(
            get_spec("llama3").hf_config(run.args),
            _to_hf(start, run.args),
            run.tokens,
            run.labels,
            optimizer=run.optimizer,
            rates=run.rates,
            max_norm=run.max_norm,
        )
    return references[key]


# ranks, micro-batches per rank, when gradients are reduced, reshard after forward
SPLITS = [
    (1, 1, "last", None),
    (1, 4, "last", None),
    (2, 1, "last", None),
    (2, 2, "last", True),
    (2, 4, "every", None),
    (4, 1, "last", False),
    (4, 2, "last", None),
]


@pytest.mark.parametrize("optimizer", ["SGD", "AdamW"])
@pytest.mark.parametrize(("ranks", "accumulation", "sync", "reshard"), SPLITS)
def test_every_split_trains_as_transformers_does(
    pool: Pools,
    references: dict[tuple[str, str], Curve],
    optimizer: str,
    ranks: int,
    accumulation: int,
    sync: str,
    reshard: bool | None,
) -> None:
    shard = ShardPlan(param_dtype="float32", gradient_sync=sync, reshard_after_forward=reshard)  # type: ignore[arg-type]
    rates = [0.1] * STEPS if optimizer == "SGD" else WARM
    run = Run(TOKENS, LABELS, rates, shard=shard, optimizer=optimizer, accumulation=accumulation)
    _compare(pool, references, "gqa", run, ranks)


@pytest.mark.parametrize("optimizer", ["SGD", "AdamW"])
@pytest.mark.parametrize(("ranks", "replicas"), [(2, 2), (4, 2), (4, 4)], ids=["ddp-2", "hsdp-2x2", "ddp-4"])
def test_replicated_shards_train_as_transformers_does(
    pool: Pools, references: dict[tuple[str, str], Curve], optimizer: str, ranks: int, replicas: int
) -> None:
    """The gradient norm counts each shard once, however many ranks hold it."""
    rates = [0.1] * STEPS if optimizer == "SGD" else WARM
    run = Run(TOKENS, LABELS, rates, optimizer=optimizer, accumulation=2, replicas=replicas)
    _compare(pool, references, "gqa", run, ranks)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("shape", ["tied", "scaled-rope"])
def test_other_shapes_train_as_transformers_does(
    pool: Pools, references: dict[tuple[str, str], Curve], shape: str, ranks: int
) -> None:
    run = Run(TOKENS, LABELS, WARM, args=SHAPES[shape], accumulation=2)
    _compare(pool, references, shape, run, ranks)


# ranks, replicas, shape, plan
UNITS = [
    pytest.param(2, 1, "gqa", ShardPlan("float32", units="size", min_params=30_000, prefetch=1), id="size, ahead 1"),
    pytest.param(2, 1, "tied", ShardPlan("float32", units=("Block", "Embedding"), prefetch=2), id="tied classes"),
    *(
        pytest.param(*row, marks=pytest.mark.slow, id=name)
        for name, row in {
            "root": (2, 1, "gqa", ShardPlan("float32", units="root")),
            "root, always": (2, 1, "gqa", ShardPlan("float32", units="root", reshard_after_forward=True)),
            "blocks, ahead 2": (4, 1, "gqa", ShardPlan("float32", prefetch=2, reshard_after_forward=True)),
            "over 2 of 4, ahead 1": (4, 1, "gqa", ShardPlan("float32", prefetch=1, reshard_after_forward=2)),
            "hsdp-2x2, small units": (4, 2, "gqa", ShardPlan("float32", units="size", min_params=4_000, prefetch=3)),
            "ddp, classes": (2, 2, "gqa", ShardPlan("float32", units=("Attention", "FeedForward"))),
            "nested": (2, 1, "gqa", ShardPlan("float32", units=("Block", "Linear"), reshard_after_forward=True)),
        }.items()
    ),
]


@pytest.mark.parametrize(("ranks", "replicas", "shape", "shard"), UNITS)
def test_other_units_train_as_transformers_does(
    pool: Pools, references: dict[tuple[str, str], Curve], ranks: int, replicas: int, shape: str, shard: ShardPlan
) -> None:
    run = Run(TOKENS, LABELS, WARM, args=SHAPES[shape], shard=shard, accumulation=2, replicas=replicas)
    _compare(pool, references, shape, run, ranks)


@pytest.mark.slow
def test_units_inside_recomputed_blocks_train_as_transformers_does(
    pool: Pools, references: dict[tuple[str, str], Curve]
) -> None:
    shard = ShardPlan("float32", units=("Block", "Attention"), prefetch=2, reshard_after_forward=True)
    run = Run(TOKENS, LABELS, WARM, shard=shard, accumulation=2, activations=ActivationCheckpointPlan("full"))
    _compare(pool, references, "gqa", run, 2)


def _compare(pool: Pools, references: dict[tuple[str, str], Curve], shape: str, run: Run, ranks: int) -> None:
    expected = _reference(references, pool, shape, run)
    curves = pool(ranks).run(train, run)
    ours = curves[0]
    for other in curves[1:]:
        assert other.losses == ours.losses and other.norms == ours.norms, "ranks disagree about the loss"
    gradients = _to_hf(ours.gradients, run.args)
    assert gradients.keys() == expected.gradients.keys()
    # Ours are caught after clipping, the reference's before.
    clip = min(1.0, run.max_norm / (expected.norms[0] + 1e-6))
    for name, gradient in expected.gradients.items():
        assert _relative(gradients[name], gradient * clip) < 1e-6, name
    torch.testing.assert_close(torch.tensor(ours.losses), torch.tensor(expected.losses), rtol=0, atol=5e-6)
    weights_within = 1e-6 if run.optimizer == "SGD" else 1e-4
    norms_within = 1e-5 if run.optimizer == "SGD" else 1e-4
    torch.testing.assert_close(torch.tensor(ours.norms), torch.tensor(expected.norms), rtol=norms_within, atol=0)
    weights = _to_hf(ours.weights, run.args)
    for name, weight in expected.weights.items():
        assert _relative(weights[name], weight) < weights_within, name
