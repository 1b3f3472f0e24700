"""Norms of weights and of gradients, on every way to divide a model."""

from __future__ import annotations

import math

import pytest
import torch

from tests.support.whole_runs import make_trainer, of_whole_weights, on_each_layout
from titanlite.dist.dist_env import DistEnv
from titanlite.dist.local_parts import plain
from titanlite.optim.gradients import square_sum


def _squares(world: DistEnv, folder: str, *flags: str) -> tuple[float, dict[str, float]]:
    """Train; return this rank's share of the squares of all weights, and parameter → its own."""
    trainer = make_trainer(world, folder, "--training.steps=2", *flags)
    trainer.train()
    model = trainer.parts.model
    share = square_sum(model.parameters(), world.device, plain)
    assert not share.requires_grad
    return share.item(), of_whole_weights(model, lambda weight: weight.square().sum())


@on_each_layout
def test_shares_of_the_squares_of_weights_add_up_to_those_of_the_model(
    pool, tmp_path, ranks, flags
):
    found = pool(ranks).run(_squares, str(tmp_path), *flags)
    whole: dict[str, float] = {}
    for _, part in found:
        whole |= part
    assert len(whole) == 21
    assert math.fsum(share for share, _ in found) == pytest.approx(sum(whole.values()), rel=1e-6)


def test_what_is_counted_is_a_choice_and_frozen_weights_have_no_gradient():
    weights = [torch.nn.Parameter(torch.full((4,), 3.0)), torch.nn.Parameter(torch.ones(2))]
    weights[0].grad = torch.full((4,), 0.5)
    device = torch.device("cpu")
    assert square_sum(weights, device).item() == 1.0
    assert square_sum(weights, device, plain).item() == 38.0
