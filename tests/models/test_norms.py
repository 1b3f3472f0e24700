"""Norms that only some families have, by themselves: bf16, devices, memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor

from tests.support.pool import Pools
from titanlite.dist.dist_env import DistEnv
from titanlite.models.norms import OffsetRMSNorm, WholeNorm


def test_one_plus_weight_is_computed_in_fp32() -> None:
    """A weight of 1 / 1000 is kept in bf16, and 1 + 1 / 1000 is not."""
    norm = OffsetRMSNorm(64, 1e-6).to(torch.bfloat16)
    nn.init.constant_(norm.weight, 1e-3)
    x = torch.randn(8, 64, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    factor = 1 + norm.weight.double()
    exact = F.rms_norm(x.double(), (64,), factor, 1e-6)
    rounded = F.rms_norm(x.double(), (64,), None, 1e-6)
    found = norm(x)
    assert found.dtype == torch.bfloat16
    assert found.equal(exact.to(torch.bfloat16))
    assert not found.equal(rounded.to(torch.bfloat16))


def divided(world: DistEnv, dtype: torch.dtype, compiled: bool) -> dict[str, Any]:
    """A norm over the heads of two ranks, and the same on one."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import parallelize_module

    from titanlite.parallel.tensor_norm import DividedNorm

    torch.manual_seed(0)
    whole = WholeNorm(32, eps=1e-6)
    nn.init.normal_(whole.weight)
    x = torch.randn(2, 6, 4, 8, dtype=dtype)
    gradient = torch.randn(2, 6, 4, 8, dtype=dtype)
    mine = slice(2 * world.rank, 2 * world.rank + 2)
    part = x[:, :, mine].clone().requires_grad_()
    x.requires_grad_()
    expected = whole.to(dtype)(x)
    expected.backward(gradient)
    other = WholeNorm(32, eps=1e-6)
    other.load_state_dict(whole.state_dict())
    other = other.to(dtype)
    mesh = init_device_mesh("cpu", (world.size,))
    parallelize_module(other, mesh, DividedNorm())
    run = torch.compile(other, backend="aot_eager") if compiled else other
    found = run(part)
    found.backward(gradient[:, :, mine])
    assert isinstance(other.weight.grad, DTensor)
    assert whole.weight.grad is not None and x.grad is not None
    return {
        "output": (found.detach(), expected[:, :, mine].detach()),
        "of x": (part.grad, x.grad[:, :, mine]),
        "of weight": (other.weight.grad.full_tensor(), whole.weight.grad),
    }


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("compiled", [False, True])
def test_ranks_that_divide_the_heads_have_one_mean(pool: Pools, compiled: bool) -> None:
    for dtype, within in ((torch.float32, 1e-6), (torch.bfloat16, 2e-2)):
        for found in pool(2).run(divided, dtype, compiled):
            for name, (ours, expected) in found.items():
                torch.testing.assert_close(ours, expected, rtol=within, atol=within, msg=name)
