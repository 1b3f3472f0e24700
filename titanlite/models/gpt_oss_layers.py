"""The modules of GPT-OSS: attention with sinks and biases, experts with biases and a clamped
SwiGLU.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor

from titanlite.models.autograd import fresh
from titanlite.models.experts.grouped import (
    AddBias,
    Experts,
    experts_of_rows,
    grouped_mm,
    local,
    sum_by_expert,
)
from titanlite.models.experts.layer import MoE, MoEBlock, MoEDecoder
from titanlite.models.layers import Attention
from titanlite.models.sinks import SinkAttention

if TYPE_CHECKING:
    from titanlite.models.document_attention import DocumentMask
    from titanlite.models.gpt_oss import GptOssArgs

#: Slope of the sigmoid that gates.
_SLOPE = 1.702
#: Gates are clamped above, and what they multiply on both sides.
_LIMIT = 7.0


class Sinks(nn.Module):
    """The score of each head's sink; tensor-parallel ranks have those of their heads."""

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(heads))

    def forward(self) -> Tensor:
        """Return the scores of this rank's heads: [heads]."""
        return self.weight.to_local() if isinstance(self.weight, DTensor) else self.weight


class GptOssAttention(Attention):
    """Grouped-query attention with biases in its linears and a sink in each head."""

    def __init__(self, args: GptOssArgs) -> None:
        super().__init__(args)
        for name, size in args.attention_linears().items():
            linear = nn.Linear(size.in_features, size.out_features)
            setattr(self, name.removeprefix("attention."), linear)
        self.sinks = Sinks(args.n_heads)
        self.inner_attention = SinkAttention(args.window)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: DocumentMask | None) -> Tensor:
        return self.inner_attention(q, k, v, mask, self.sinks())


class _ClampedSwiglu(torch.autograd.Function):
    """(up + 1) * gate * sigmoid(1.702 gate), both clamped, after the bias of each row's expert.

    h: [rows, 2 * width], gate and up in turns. Keeps h alone; computes in float32.
    """

    @staticmethod
    def forward(ctx: Any, h: Tensor, bias: Tensor, experts: Tensor, ends: Tensor) -> Tensor:
        ctx.save_for_backward(h, bias, experts, ends)
        pairs = (h + bias[experts]).float()
        gate = pairs[:, ::2].clamp_(max=_LIMIT)
        up = pairs[:, 1::2].clamp_(-_LIMIT, _LIMIT)
        result = (gate * _SLOPE).sigmoid_().mul_(gate).mul_(up.add_(1))
        return fresh(result.to(h.dtype))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None]:
        h, bias, experts, ends = ctx.saved_tensors
        pairs = (h + bias[experts]).float()
        gate = pairs[:, ::2]
        up = pairs[:, 1::2]
        is_gate_free = gate <= _LIMIT
        is_up_free = (up <= _LIMIT).logical_and_(up >= -_LIMIT)
        gate.clamp_(max=_LIMIT)
        up.clamp_(-_LIMIT, _LIMIT)
        share = (gate * _SLOPE).sigmoid_()
        gated = gate * share
        of_up = (grad * gated).mul_(is_up_free)
        # d gated / d gate = share + slope * gated * (1 - share)
        slope = gated.mul_(_SLOPE).addcmul_(gated, share, value=-1).add_(share)
        of_gate = up.add_(1).mul_(grad).mul_(slope).mul_(is_gate_free)
        gate.copy_(of_gate)
        up.copy_(of_up)
        of_h = pairs.to(h.dtype)
        return of_h, sum_by_expert(of_h, ends), None, None


class GptOssExperts(Experts):
    """Clamped SwiGLU experts with biases, in the layout of Hugging Face."""

    def add_parameters(self, n_experts: int, dim: int, width: int) -> None:
        self.gate_up = nn.Parameter(torch.empty(n_experts, dim, 2 * width))
        self.gate_up_bias = nn.Parameter(torch.empty(n_experts, 2 * width))
        self.down = nn.Parameter(torch.empty(n_experts, width, dim))
        self.down_bias = nn.Parameter(torch.empty(n_experts, dim))

    def products(self, x: Tensor, ends: Tensor) -> Tensor:
        experts = experts_of_rows(x, ends)
        h = grouped_mm(x, local(self.gate_up), ends)
        inner = _ClampedSwiglu.apply(h, local(self.gate_up_bias), experts, ends)
        y = grouped_mm(inner, local(self.down), ends)
        return AddBias.apply(y, local(self.down_bias), experts, ends)


class GptOssMoE(MoE):
    """An MoE layer of `GptOssExperts`."""

    experts_class = GptOssExperts


class GptOssBlock(MoEBlock):
    """A block of GPT-OSS."""

    attention_class = GptOssAttention
    moe_class = GptOssMoE


class GptOss(MoEDecoder):
    """The decoder of family gpt_oss."""

    block_class = GptOssBlock
