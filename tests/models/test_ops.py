"""The single-node operations compute what torch's separate ones do.

tests/plan/test_memory_trace.py has what they keep.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.support.llamas import SMALL, VARIANTS, built
from titanlite.models.autograd import RMSNorm, silu_mul
from titanlite.models.layers import Llama
from titanlite.models.norms import OffsetRMSNorm
from titanlite.models.rope import Rope, Rotation, _Rotate

DTYPES = [torch.float32, torch.bfloat16]


def gradients(function: Callable[..., Tensor], *inputs: Tensor) -> list[Tensor]:
    leaves = [t.detach().clone().requires_grad_() for t in inputs]
    out = function(*leaves)
    weights = torch.linspace(-1, 2, out.numel(), dtype=torch.float32).view_as(out).to(out.dtype)
    out.backward(weights)
    return [out.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)]


@pytest.mark.parametrize("dtype", DTYPES)
def test_silu_mul_is_silu_times(dtype):
    gate, x = (torch.randn(3, 7, 48).to(dtype) * 3 for _ in range(2))
    ours = gradients(silu_mul, gate, x)
    theirs = gradients(lambda g, t: F.silu(g) * t, gate, x)
    for mine, expected in zip(ours, theirs, strict=True):
        assert torch.equal(mine, expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_norm_is_torchs(dtype):
    ours, theirs = (kind(48, eps=1e-5).to(dtype) for kind in (RMSNorm, nn.RMSNorm))
    for norm in (ours, theirs):
        norm.weight.data.copy_(torch.linspace(0.5, 1.5, 48))
    x = torch.randn(3, 7, 48).to(dtype) * 3 + 1
    (out, grad), (expected, expected_grad) = gradients(ours, x), gradients(theirs, x)
    assert torch.equal(out, expected)
    tolerance = {torch.float32: 1e-6, torch.bfloat16: 1e-2}[dtype]
    for mine, other in ((grad, expected_grad), (ours.weight.grad, theirs.weight.grad)):
        assert mine is not None
        assert other is not None
        assert mine.dtype == dtype
        assert (mine.float() - other.float()).norm() / other.float().norm() < tolerance


def test_one_plus_weight_is_computed_in_fp32():
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


def test_rope_in_a_bf16_model_differs_from_fp32_only_by_the_rounding_of_its_inputs():
    rope = Rope(16, 4096, 5e5, None).to(torch.bfloat16)
    assert (rope.cos.dtype, rope.sin.dtype) == (torch.float32, torch.float32)
    assert torch.equal(rope.cos, Rope(16, 4096, 5e5, None).cos)
    x = torch.randn(1, 4096, 2, 16).bfloat16()
    rotated = rope(4096)(x)
    assert rotated.dtype == torch.bfloat16
    assert torch.equal(rotated, rope(4096)(x.float()).bfloat16())
    coarse = Rotation(rope.cos.bfloat16().unsqueeze(1), rope.sin.bfloat16().unsqueeze(1))(x)
    assert not torch.equal(rotated, coarse)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_rotation_of_eager_cuda_is_the_formula(dtype):
    rotation = Rope(16, 512, 5e5, None)(512)
    x = torch.randn(2, 512, 3, 16).to(dtype)
    ours = gradients(lambda t: _Rotate.apply(t, rotation.cos, rotation.sin), x)
    # One rounding to the dtype of x each; before it a fused multiply-add differs in the last bits
    # of fp32.
    near = {"rtol": torch.finfo(dtype).eps, "atol": 1e-6}
    for mine, expected in zip(ours, gradients(rotation, x), strict=True):
        torch.testing.assert_close(mine, expected, **near)


def test_a_sequence_longer_than_the_tables_is_refused():
    with pytest.raises(
        ValueError, match=r"129 tokens is longer than the model's RoPE tables \(128\)"
    ):
        built(SMALL)(torch.zeros(1, 129, dtype=torch.int64))


def test_names_are_frozen_and_no_table_is_in_a_checkpoint():
    block = [
        "attention.wq.weight",
        "attention.wk.weight",
        "attention.wv.weight",
        "attention.wo.weight",
        "feed_forward.w1.weight",
        "feed_forward.w2.weight",
        "feed_forward.w3.weight",
        "attention_norm.weight",
        "ffn_norm.weight",
    ]
    names = ["tok_embeddings.weight", *(f"layers.{i}.{name}" for i in (0, 1) for name in block)]
    names += ["norm.weight", "output.weight"]
    assert list(Llama(SMALL).state_dict()) == names
    assert list(Llama(VARIANTS["all"]).state_dict()) == names
