"""Gradient norms by layer are those of the whole gradient, however it is sharded."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from tests.support.golden_run import GoldenRun
from tests.support.harness import Run, batches, full, stepper
from tests.support.pool import Pools
from tests.support.whole_runs import scalars
from titanlite.dist.dist_env import DistEnv
from titanlite.models.mixtral import MixtralArgs
from titanlite.optim.gradients import layer_of

TOKENS, LABELS = batches(1, 8, 16, 192)
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


def test_norms_by_layer_are_those_of_the_whole_gradient(pool: Pools) -> None:
    """Two replicas, each on two ranks."""
    _compare_with_one_rank(pool, RUN, 4, replace(RUN, replicas=2))


def test_norms_by_layer_are_those_of_all_experts(pool: Pools) -> None:
    """Two ranks divide the experts, and share every other weight."""
    # Without the loss that balances experts: it depends on how sequences are cut into calls.
    args = MixtralArgs(
        64, 2, 4, n_kv_heads=2, ffn_dim=48, vocab_size=192, n_experts=4, aux_loss=0.0
    )
    mixture = replace(RUN, family="mixtral", args=args)
    _compare_with_one_rank(pool, mixture, 2, replace(mixture, expert=2))


def test_wrappers_do_not_change_a_layers_name() -> None:
    assert layer_of("layers.11._checkpoint_wrapped_module.attention.wq.weight") == "layers.11"
    assert layer_of("_orig_mod.output.weight") == "output"


def test_the_trainer_writes_them_with_every_nth_log(golden: GoldenRun) -> None:
    names = [f"grad_norm/{layer}" for layer in LAYERS]
    rows = {step: row for step, row in golden.rows(names[0]).items() if step <= 20}
    assert list(rows) == [1, 4, 7, 10, 13, 16, 19]
    for row in rows.values():
        whole = math.sqrt(sum(row[name] ** 2 for name in names))
        assert whole == pytest.approx(row["grad_norm"], rel=1e-6)
    (folder,) = (golden.folder / "tb").iterdir()
    shown = {step: value for step, value in scalars(folder)[names[1]] if step <= 20}
    assert shown == pytest.approx({step: row[names[1]] for step, row in rows.items()}, rel=1e-6)
