"""What a step does on the wire and to the weights: collectives, their dtypes, and that every
parameter learns.
"""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from tests.support.harness import (
    TINY,
    Run,
    batches,
    build_tiny,
    full,
    full_precision,
    micro_batches,
    stepper,
    train,
)
from tests.support.pool import Pools
from tests.support.watch import GATHER, REDUCE, SUM, count_collectives
from tests.support.whole_runs import scalars
from titanlite.config.sections import Training
from titanlite.dist.dist_env import DistEnv
from titanlite.models.mixtral import MixtralArgs
from titanlite.optim.gradients import layer_of, square_sum

TOKENS, LABELS = batches(1, 8, 16, 192)

BF16, FP32, INT64 = torch.bfloat16, torch.float32, torch.int64
UNITS = TINY.n_layers + 2  # embedding, blocks, norm with head


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(("sync", "reductions"), [("last", UNITS), ("every", 4 * UNITS)])
def test_accumulation_reduces_once_or_with_every_micro_batch(pool, sync, reductions):
    run = Run(TOKENS, LABELS, [1e-3], training=full_precision(gradient_sync=sync), accumulation=4)
    seen = pool(2).run(count_collectives, run)[0]
    assert seen[REDUCE, FP32] == reductions
    assert seen[SUM, FP32] == seen[SUM, INT64] == 1


@pytest.mark.parametrize("reduce_dtype", ["float32", "bfloat16"])
def test_mixed_precision_gathers_and_reduces_in_its_dtypes(pool, reduce_dtype):
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


def test_one_rank_computes_in_the_same_precision_as_many(pool):
    """Mixed precision is silently lost where sharding is skipped at world size 1."""
    run = Run(TOKENS, LABELS, [1e-3], training=Training())
    for ranks in (1, 2):
        assert pool(ranks).run(_compute_dtypes, run)[0] == {
            "layers.0.attention.wq": BF16,
            "output": BF16,
            "master": FP32,
        }


def test_every_parameter_moves(pool):
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


def test_norm_of_a_large_cpu_tensor_loses_no_small_squares():
    elements = 2**27
    # Equal elements are the worst case: each square is rounded alike. Random ones are right to 2e-7
    # (fp32).
    weight = torch.nn.Parameter(torch.zeros((), dtype=torch.bfloat16).expand(elements))
    weight.grad = torch.full((elements,), 1e-3, dtype=torch.bfloat16)
    exact = weight.grad[0].item() ** 2 * elements
    assert square_sum([weight], torch.device("cpu")).item() == pytest.approx(exact, rel=1.2e-4)


RUN = Run(TOKENS, LABELS, [1e-3], accumulation=2)
LAYERS = ["tok_embeddings", "layers.0", "layers.1", "norm", "output"]


def _norms(world: DistEnv, run: Run) -> tuple[dict[str, float], dict[str, float], float]:
    """Norms by layer as the step tells them and as the full gradients have them, and the norm of
    all.
    """
    # A norm to clip to that is never reached: clipping happens in place.
    model, optimizer, take = stepper(world, run, max_norm=1e9, layer_norms=True)
    gradients: dict[str, torch.Tensor] = {}

    def keep(*_: object) -> None:
        gradients.update(
            {name: full(p.grad) for name, p in model.named_parameters() if p.grad is not None}
        )

    optimizer.register_step_pre_hook(keep)
    result = take(1)
    assert result.layer_norms is not None
    squares = dict.fromkeys(LAYERS, 0.0)
    for name, gradient in gradients.items():
        squares[layer_of(name)] += gradient.double().square().sum().item()
    told = {layer: norm.item() for layer, norm in result.layer_norms.items()}
    return (
        told,
        {layer: math.sqrt(square) for layer, square in squares.items()},
        result.grad_norm.item(),
    )


def _compare_with_one_rank(pool: Pools, alone: Run, ranks: int, shared: Run) -> None:
    """The norms that ranks tell are those of the whole gradient, and those of a rank alone."""
    (expected, _, _), *_ = pool(1).run(_norms, alone)
    for told, true, norm in pool(ranks).run(_norms, shared):
        assert list(told) == LAYERS
        assert told == pytest.approx(true, rel=1e-6)
        assert told == pytest.approx(expected, rel=1e-5)
        assert math.sqrt(sum(value**2 for value in told.values())) == pytest.approx(norm, rel=1e-6)
        assert min(told.values()) > 0


def test_norms_by_layer_are_those_of_the_whole_gradient(pool):
    """Two replicas, each on two ranks."""
    _compare_with_one_rank(pool, RUN, 4, replace(RUN, replicas=2))


def test_norms_by_layer_are_those_of_all_experts(pool):
    """Two ranks divide the experts, and share every other weight."""
    # Without the loss that balances experts: it depends on how sequences are cut into calls.
    args = MixtralArgs(
        64, 2, 4, n_kv_heads=2, ffn_dim=48, vocab_size=192, n_experts=4, aux_loss=0.0
    )
    mixture = replace(RUN, family="mixtral", args=args)
    _compare_with_one_rank(pool, mixture, 2, replace(mixture, expert=2))


def test_the_trainer_writes_them_with_every_nth_log(golden):
    names = [f"grad_norm/{layer}" for layer in LAYERS]
    rows = {step: row for step, row in golden.rows(names[0]).items() if step <= 20}
    assert list(rows) == [1, 4, 7, 10, 13, 16, 19]
    for row in rows.values():
        whole = math.sqrt(sum(row[name] ** 2 for name in names))
        assert whole == pytest.approx(row["grad_norm"], rel=1e-6)
    (folder,) = (golden.folder / "tb").iterdir()
    shown = {step: value for step, value in scalars(folder)[names[1]] if step <= 20}
    assert shown == pytest.approx({step: row[names[1]] for step, row in rows.items()}, rel=1e-6)
