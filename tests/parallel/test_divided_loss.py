"""Cross-entropy in place on logits divided by vocabulary: values and gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.tensor import DTensor, Shard

from titanlite.dist.dist_env import DistEnv
from titanlite.parallel.tensor import tensor_loss
from titanlite.regularized_loss import regularized

IGNORE = -100
ROWS = 3
SEQ = 17
VOCAB = 240


def _batch() -> tuple[torch.Tensor, torch.Tensor]:
    """Return logits as large as an untrained model's worst, and labels with padding and both ends
    of each part.
    """
    generator = torch.Generator().manual_seed(3)
    logits = 8 * torch.randn(ROWS, SEQ, VOCAB, generator=generator)
    labels = torch.randint(0, VOCAB, (ROWS, SEQ), generator=generator)
    labels[0, :8] = torch.arange(8) * (VOCAB // 4) // 2
    labels[1, :4] = torch.arange(1, 5) * (VOCAB // 4) - 1
    labels[2, 5:] = IGNORE
    return logits, labels


def _divided(world: DistEnv, logits: torch.Tensor) -> DTensor:
    mesh = world.build_mesh(dp_shard=1, tp=world.size)["tp"]
    part = logits.chunk(world.size, -1)[world.rank].clone()
    return DTensor.from_local(part, mesh, [Shard(-1)], run_check=False).requires_grad_()


def _figures(world: DistEnv, z: float, smoothing: float, dtype: torch.dtype) -> dict[str, Any]:
    whole, labels = _batch()
    logits = _divided(world, whole.to(dtype))
    loss = tensor_loss(regularized(z, smoothing))(logits, labels)
    (3 * loss).backward()
    with torch.no_grad():
        again = tensor_loss(regularized(z, smoothing))(logits, labels)
    assert isinstance(logits.grad, DTensor)
    return {"loss": loss.item(), "again": again.item(), "gradient": logits.grad.full_tensor()}


def _expected(z: float, smoothing: float, dtype: torch.dtype) -> tuple[float, torch.Tensor]:
    """Return value and gradient in float64, from the formulas alone."""
    logits, labels = _batch()
    exact = logits.to(dtype).double().requires_grad_()
    rows = exact.flatten(0, 1)
    targets = labels.flatten()
    objective = F.cross_entropy(rows, targets, label_smoothing=smoothing, reduction="sum")
    (3 * (objective + z * rows[targets != IGNORE].logsumexp(-1).square().sum())).backward()
    assert exact.grad is not None
    return F.cross_entropy(rows, targets, reduction="sum").item(), exact.grad


@pytest.mark.parametrize(
    ("z", "smoothing", "dtype", "near"),
    [
        (0.0, 0.0, torch.float32, {"rtol": 1e-5, "atol": 3e-7}),
        (1e-2, 0.1, torch.float32, {"rtol": 1e-5, "atol": 3e-7}),
        # Rounded once.
        (0.0, 0.0, torch.bfloat16, {"rtol": 2**-8, "atol": 1e-7}),
    ],
    ids=["plain", "z-loss and smoothing", "bfloat16"],
)
def test_value_and_gradient_are_those_of_the_whole_loss(pool, z, smoothing, dtype, near):
    value, gradient = _expected(z, smoothing, dtype)
    for found in pool(2).run(_figures, z, smoothing, dtype):
        assert found["loss"] == found["again"] == pytest.approx(value, rel=1e-6)
        assert found["gradient"].dtype == dtype
        torch.testing.assert_close(found["gradient"].double(), gradient, **near)


def _spoiled(world: DistEnv) -> tuple[float, float]:
    whole, labels = _batch()
    whole[0, 2, -1] = float("inf")
    poisoned = tensor_loss(regularized(0.0, 0.0))(_divided(world, whole), labels)
    logits = _divided(world, whole.nan_to_num(posinf=0.0))
    padding = tensor_loss(regularized(0.0, 0.0))(logits, torch.full_like(labels, IGNORE))
    padding.backward()
    assert isinstance(logits.grad, DTensor)
    return poisoned.item(), padding.item() + logits.grad.to_local().abs().max().item()


def test_infinities_show_on_every_rank_and_padding_alone_is_zero(pool):
    for poisoned, padding in pool(2).run(_spoiled):
        assert poisoned != poisoned  # NaN, as of `cross_entropy`
        assert padding == 0.0
