"""The single-node operations compute what torch's separate ones do, and keep less."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from titanlite.models.autograd import RMSNorm, silu_mul

DTYPES = [torch.float32, torch.bfloat16]


def gradients(function: Callable[..., Tensor], *inputs: Tensor) -> list[Tensor]:
    leaves = [t.detach().clone().requires_grad_() for t in inputs]
    out = function(*leaves)
    weights = torch.linspace(-1, 2, out.numel(), dtype=torch.float32).view_as(out).to(out.dtype)
    out.backward(weights)
    return [out.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)]


def kept_bytes(function: Callable[..., Tensor], *inputs: Tensor) -> int:
    """Bytes of the distinct storages that autograd keeps, without those of the inputs."""
    storages: dict[int, int] = {}

    def pack(t: Tensor) -> Tensor:
        storages[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    leaves = [t.detach().clone().requires_grad_() for t in inputs]
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        function(*leaves)
    for leaf in leaves:
        storages.pop(leaf.untyped_storage().data_ptr(), None)
    return sum(storages.values())


def norms(dtype: torch.dtype) -> tuple[nn.RMSNorm, nn.RMSNorm]:
    pair = RMSNorm(48, eps=1e-5).to(dtype), nn.RMSNorm(48, eps=1e-5).to(dtype)
    for norm in pair:
        with torch.no_grad():
            norm.weight.copy_(torch.linspace(0.5, 1.5, 48))
    return pair


@pytest.mark.parametrize("dtype", DTYPES)
def test_silu_mul_is_silu_times(dtype: torch.dtype) -> None:
    gate, x = (torch.randn(3, 7, 48).to(dtype) * 3 for _ in range(2))
    ours = gradients(silu_mul, gate, x)
    theirs = gradients(lambda g, t: F.silu(g) * t, gate, x)
    for mine, expected in zip(ours, theirs, strict=True):
        assert torch.equal(mine, expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_norm_is_torchs(dtype: torch.dtype) -> None:
    ours, theirs = norms(dtype)
    x = torch.randn(3, 7, 48).to(dtype) * 3 + 1
    (out, grad), (expected, expected_grad) = gradients(ours, x), gradients(theirs, x)
    assert torch.equal(out, expected)
    tolerance = {torch.float32: 1e-6, torch.bfloat16: 1e-2}[dtype]
    for mine, other in ((grad, expected_grad), (ours.weight.grad, theirs.weight.grad)):
        assert mine is not None
        assert other is not None
        assert mine.dtype == dtype
        assert (mine.float() - other.float()).norm() / other.float().norm() < tolerance


def test_both_keep_their_inputs_alone() -> None:
    gate = torch.randn(4, 96)
    x = torch.randn(4, 96)
    assert kept_bytes(silu_mul, gate, x) == 0
    assert kept_bytes(lambda g, t: F.silu(g) * t, gate, x) == gate.nbytes
    ours, theirs = norms(torch.bfloat16)
    rows = torch.randn(64, 48).bfloat16()
    assert kept_bytes(ours, rows) == 64 * 4 + ours.weight.nbytes  # one fp32 number per row
    assert kept_bytes(theirs, rows) >= 2 * rows.nbytes
