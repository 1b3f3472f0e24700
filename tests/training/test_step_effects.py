"""What a step does on the wire and to the weights: collectives, their dtypes, and that every
parameter learns.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.support.harness import (
    TINY,
    Run,
    batches,
    build_tiny,
    full_precision,
    micro_batches,
    train,
)
from tests.support.pool import Pools
from tests.support.watch import GATHER, REDUCE, SUM, count_collectives
from titanlite.config.sections import Training
from titanlite.dist.dist_env import DistEnv
from titanlite.optim.gradients import square_norm

TOKENS, LABELS = batches(1, 8, 16, 192)

BF16, FP32, INT64 = torch.bfloat16, torch.float32, torch.int64
UNITS = TINY.n_layers + 2  # embedding, blocks, norm with head


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(("sync", "reductions"), [("last", UNITS), ("every", 4 * UNITS)])
def test_accumulation_reduces_once_or_with_every_micro_batch(
    pool: Pools, sync: str, reductions: int
) -> None:
    run = Run(TOKENS, LABELS, [1e-3], training=full_precision(gradient_sync=sync), accumulation=4)
    seen = pool(2).run(count_collectives, run)[0]
    assert seen[REDUCE, FP32] == reductions
    assert seen[SUM, FP32] == seen[SUM, INT64] == 1


@pytest.mark.parametrize("reduce_dtype", ["float32", "bfloat16"])
def test_mixed_precision_gathers_and_reduces_in_its_dtypes(pool: Pools, reduce_dtype: str) -> None:
    training = Training(mixed_precision_reduce=reduce_dtype)  # type: ignore[arg-type]
    seen = pool(2).run(count_collectives, Run(TOKENS, LABELS, [1e-3], training=training))[0]
    assert seen[GATHER, BF16]
    assert not seen[GATHER, FP32]
    assert seen[REDUCE, getattr(torch, reduce_dtype)] == UNITS
    assert sum(n for (name, _), n in seen.items() if name == REDUCE) == UNITS


def _compute_dtypes(world: DistEnv, run: Run) -> dict[str, torch.dtype]:
    model, _, rank = build_tiny(world, run)
    seen: dict[str, torch.dtype] = {}
    watched = ("layers.0.attention.wq", "output")
    for name, module in model.named_modules():
        if name in watched:
            module.register_forward_hook(
                lambda m, args, out, name=name: seen.__setitem__(name, out.dtype)
            )
    batch = micro_batches(run, 0, rank, world.size)[0]
    model(batch.tokens)
    seen["master"] = next(model.parameters()).dtype
    return seen


def test_one_rank_computes_in_the_same_precision_as_many(pool: Pools) -> None:
    """Mixed precision is silently lost where sharding is skipped at world size 1."""
    run = Run(TOKENS, LABELS, [1e-3], training=Training())
    for ranks in (1, 2):
        assert pool(ranks).run(_compute_dtypes, run)[0] == {
            "layers.0.attention.wq": BF16,
            "output": BF16,
            "master": FP32,
        }


def test_every_parameter_moves(pool: Pools) -> None:
    """Norm weights near 1 would stand still in bf16 weights: updates of 1e-3 are below their
    spacing.
    """
    tokens, labels = batches(20, 8, 32, 192)
    # Without decay, which moves a weight whether it has a gradient or not.
    run = Run(tokens, labels, [1e-4] * 20, training=Training(), weight_decay=0.0)
    before, after = (
        pool(2).run(train, replace(run, rates=run.rates[:n]))[0].weights for n in (0, 20)
    )
    for name, weight in before.items():
        changed = (after[name] != weight).float().mean()
        assert changed > 0.99, f"{name}: {changed:.1%} of its values moved"


def test_norm_of_a_large_cpu_tensor_loses_no_small_squares() -> None:
    elements = 2**27
    # Equal elements are the worst case: each square is rounded alike. Random ones are right to 2e-7
    # (fp32).
    weight = torch.nn.Parameter(torch.zeros((), dtype=torch.bfloat16).expand(elements))
    weight.grad = torch.full((elements,), 1e-3, dtype=torch.bfloat16)
    exact = weight.grad[0].item() ** 2 * elements
    assert square_norm([weight], torch.device("cpu")).item() == pytest.approx(exact, rel=1.2e-4)
