"""The mixture of experts against a loop over tokens."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from titanlite.models.mixtral import MixtralArgs
from titanlite.models.moe import MoE

ARGS = MixtralArgs(dim=16, n_layers=2, n_heads=2, ffn_dim=24, vocab_size=32, n_experts=5, top_k=2, aux_loss=0.0)


def make(args: MixtralArgs = ARGS, dtype: torch.dtype = torch.float32) -> MoE:
    moe = MoE(args)
    for i, parameter in enumerate(moe.parameters()):
        torch.nn.init.normal_(parameter, std=0.3, generator=torch.Generator().manual_seed(i))
    return moe.to(dtype)


def inputs(*shape: int, seed: int = 9) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), requires_grad=True)


def by_token(moe: MoE, x: Tensor) -> Tensor:
    """Compute each token by itself."""
    rows = []
    for token in x.flatten(0, 1):
        best = (moe.gate.weight @ token).softmax(0).topk(moe.top_k)
        e = moe.experts
        results = [e.w2[i] @ (F.silu(e.w1[i] @ token) * (e.w3[i] @ token)) for i in best.indices]
        rows.append(torch.stack(results).T @ (best.values / best.values.sum()))
    return torch.stack(rows).view_as(x)


def gradients(moe: MoE, x: Tensor, y: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(y, [x, *moe.parameters()], torch.cos(y).detach()))


def test_equals_a_loop_over_tokens() -> None:
    moe, x = make(), inputs(2, 9, 16)
    y, expected = moe(x), by_token(moe, x)
    torch.testing.assert_close(y, expected, rtol=1e-5, atol=1e-6)
    for ours, theirs in zip(gradients(moe, x, y), gradients(moe, x, expected), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


def test_an_expert_without_a_token_and_ties() -> None:
    moe, x = make(), inputs(1, 6, 16)
    with torch.no_grad():
        moe.gate.weight.zero_()  # all experts are equal: top-k takes two of them
    y = moe(x)
    torch.testing.assert_close(y, by_token(moe, x), rtol=1e-5, atol=1e-6)
    _, _, of_w1, *_ = gradients(moe, x, y)
    used = of_w1.flatten(1).norm(dim=1) > 0
    assert used.sum() == 2 and torch.isfinite(of_w1).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_repeats_to_the_last_bit(dtype: torch.dtype) -> None:
    moe = make(dtype=dtype)
    x = inputs(4, 32, 16).detach().to(dtype).requires_grad_()
    first, second = (gradients(moe, x, moe(x)) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
