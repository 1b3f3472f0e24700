"""Norms of weights and of gradients, on every way to divide a model."""

from __future__ import annotations

import math

import pytest
import torch
from torch.distributed.tensor import DTensor

from tests.support.whole_runs import LAYOUTS, make_trainer
from titanlite.dist.dist_env import DistEnv
from titanlite.dist.local_parts import plain
from titanlite.optim.gradients import square_norm


def _norms(world: DistEnv, folder: str, *flags: str) -> tuple[float, dict[str, float]]:
    """This rank's share of the squared norm of weights; parameter -> its squared norm, whole."""
    model = make_trainer(world, folder, *flags).parts.model
    share = square_norm(model.parameters(), world.device, plain)
    whole = {}
    for name, weight in model.named_parameters():
        full = weight.full_tensor() if isinstance(weight, DTensor) else weight
        whole[name] = full.double().square().sum().item()
    assert not share.requires_grad
    return share.item(), whole


@pytest.mark.slow_after(2)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_shares_of_the_norm_of_weights_add_up_to_that_of_the_whole_model(pool, tmp_path, layout):
    ranks, flags = LAYOUTS[layout]
    found = pool(ranks).run(_norms, str(tmp_path), *flags)
    whole: dict[str, float] = {}
    for _, part in found:
        whole |= part
    assert len(whole) == 21
    assert math.fsum(share for share, _ in found) == pytest.approx(sum(whole.values()), rel=1e-6)


def test_what_is_counted_is_a_choice_and_frozen_weights_have_no_gradient():
    weights = [torch.nn.Parameter(torch.full((4,), 3.0)), torch.nn.Parameter(torch.ones(2))]
    weights[0].grad = torch.full((4,), 0.5)
    device = torch.device("cpu")
    assert square_norm(weights, device).item() == 1.0
    assert square_norm(weights, device, plain).item() == 38.0
