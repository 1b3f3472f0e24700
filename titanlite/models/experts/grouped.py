"""Rows of tokens sorted by expert, and products of each expert's rows with its matrix.

`torch.nn.functional.grouped_mm` multiplies all of them in one kernel. Counts stay on the device:
the host waits for nothing. (float32 on a GPU has no such kernel; torch then loops over the experts
and waits.) Every sum has a fixed order, so results repeat to the last bit.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor, Partial

from titanlite.models.autograd import fresh, silu_mul

#: Type of experts' numbers as keys of a sort: a GPU's radix sort takes a kernel for each byte.
EXPERT_KEY = torch.int16


def sort_by_expert(experts: Tensor, n_experts: int) -> tuple[Tensor, Tensor]:
    """Return the rows sorted by expert, [rows] int64, and each expert's count, [n_experts] int64.

    experts: [rows] integers. Rows of one expert keep their order.
    """
    sorted_experts, order = experts.to(EXPERT_KEY).sort(stable=True)
    # Searched for: counting by atomic additions is not deterministic, a comparison of each row with
    # each expert moves more bytes.
    numbers = torch.arange(n_experts + 1, dtype=EXPERT_KEY, device=experts.device)
    starts = torch.searchsorted(sorted_experts, numbers)
    return order, starts[1:] - starts[:-1]


def inverse(order: Tensor) -> Tensor:
    """Return the permutation that undoes `order`, [rows] int64."""
    places = torch.arange(len(order), device=order.device)
    return torch.empty_like(order).scatter_(0, order, places)


def by_expert(chosen: Tensor, experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """Sort the rows of tokens by expert.

    chosen: [tokens, top_k] int64. Returns counts [experts] int64, the row at each place [tokens *
    top_k] int64, and the places of each token's rows [tokens, top_k] int64.
    """
    order, counts = sort_by_expert(chosen.flatten(), experts)
    return counts, order, inverse(order).view_as(chosen)


class Dispatch(torch.autograd.Function):
    """Copies token rows to their experts' places. Its backward gathers: sums have a fixed order."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, places: Tensor) -> Tensor:
        ctx.save_for_backward(places)
        return x[order // places.size(1)]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (places,) = ctx.saved_tensors
        return grad[places].sum(1), None, None


class Combine(torch.autograd.Function):
    """Adds up the weighted results of each token's experts, one of `top_k` at a time in float32."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, weights: Tensor, order: Tensor, places: Tensor) -> Tensor:
        ctx.save_for_backward(y, weights, order, places)
        total = y[places[:, 0]] * weights[:, :1]
        for k in range(1, places.size(1)):
            total = torch.addcmul(total, y[places[:, k]], weights[:, k : k + 1])
        return fresh(total.to(y.dtype))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None]:
        y, weights, order, places = ctx.saved_tensors
        of_y = grad[order // places.size(1)].mul_(weights.flatten()[order, None])
        grad = grad.to(weights.dtype)
        of_weights = [(grad * y[place]).sum(-1) for place in places.unbind(1)]
        return of_y, torch.stack(of_weights, 1), None, None


@torch.library.custom_op("titanlite::grouped_mm", mutates_args=())
def _grouped_mm_any(a: Tensor, b: Tensor, ends: Tensor) -> Tensor:
    """torch's `grouped_mm`, whose own shape function refuses to trace or compile float32."""
    return F.grouped_mm(a, b, offs=ends)


@_grouped_mm_any.register_fake
def _(a: Tensor, b: Tensor, ends: Tensor) -> Tensor:
    if b.ndim == 3:
        return a.new_empty((a.size(0), b.size(2)))
    return a.new_empty((ends.size(0), a.size(0), b.size(1)))


def _save(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _gradients(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
    a, b, ends = ctx.saved_tensors
    return _grouped_mm_any(grad, b.mT, ends), _grouped_mm_any(grad.mT, a, ends).mT, None


_grouped_mm_any.register_autograd(_gradients, setup_context=_save)


def grouped_mm(a: Tensor, b: Tensor, ends: Tensor) -> Tensor:
    """Return each group's rows times its matrix: [rows, N].

    a: [rows, K], sorted by group; b: [groups, K, N]; ends: [groups] int32, where groups end.
    """
    return (
        F.grouped_mm(a, b, offs=ends) if a.dtype == torch.bfloat16 else _grouped_mm_any(a, b, ends)
    )


def experts_of_rows(rows: Tensor, ends: Tensor) -> Tensor:
    """Return the expert of each row, int64. ends: [experts] int32, where their rows end."""
    places = torch.arange(len(rows), device=rows.device, dtype=ends.dtype)
    return torch.searchsorted(ends, places, right=True)


def sum_by_expert(rows: Tensor, ends: Tensor) -> Tensor:
    """Return sums [experts, N] of rows [rows, N] sorted by expert, in a fixed order."""
    # A product with ones; kernels want 8 of them.
    ones = rows.new_ones(len(rows), 8)
    return grouped_mm(ones.mT, rows, ends)[:, 0]


class AddBias(torch.autograd.Function):
    """Adds to each row its expert's bias. y: [rows, N], bias: [experts, N]."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, bias: Tensor, experts: Tensor, ends: Tensor) -> Tensor:
        ctx.save_for_backward(ends)
        return fresh(y + bias[experts])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None]:
        (ends,) = ctx.saved_tensors
        return grad, sum_by_expert(grad, ends), None, None


class Exchange(Protocol):
    """Sends rows to the ranks that hold their experts, and the results back."""

    def dispatch(self, x: Tensor, counts: Tensor) -> tuple[Tensor, Tensor, Any]:
        """Return the rows for this rank's experts, sorted by expert, their counts, and a state for
        `combine`.
        """
        ...

    def combine(self, y: Tensor, state: Any) -> Tensor:
        """Return the results in the order of the rows that `dispatch` got."""
        ...

    def contexts(self) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        """Return contexts for `torch.utils.checkpoint` of a block around the experts."""
        ...


class Experts(nn.Module):
    """SwiGLU feed-forwards of equal size, their matrices in one stack."""

    def __init__(self, n_experts: int, dim: int, width: int) -> None:
        super().__init__()
        self.add_parameters(n_experts, dim, width)
        #: Set where ranks hold different experts; the parameters are then this rank's.
        self.exchange: Exchange | None = None

    def add_parameters(self, n_experts: int, dim: int, width: int) -> None:
        """Make the parameters, each [experts, …]."""
        self.w1 = nn.Parameter(torch.empty(n_experts, width, dim))
        self.w2 = nn.Parameter(torch.empty(n_experts, dim, width))
        self.w3 = nn.Parameter(torch.empty(n_experts, width, dim))

    def forward(self, x: Tensor, counts: Tensor) -> Tensor:
        """Return x's shape. x: [tokens * top_k, dim], by expert; counts: [experts] int64."""
        state = None
        if self.exchange is not None:
            x, counts, state = self.exchange.dispatch(x, counts)
        y = self.products(x, counts.cumsum(0).to(torch.int32))
        if self.exchange is None:
            return y
        return self.exchange.combine(y, state)

    def products(self, x: Tensor, ends: Tensor) -> Tensor:
        """Return each expert's result for its rows.

        x: [rows, dim], sorted by expert; ends: [experts] int32.
        """
        w1, w2, w3 = (local(w).transpose(1, 2) for w in (self.w1, self.w2, self.w3))
        inner = silu_mul(grouped_mm(x, w1, ends), grouped_mm(x, w3, ends))
        return grouped_mm(inner, w2, ends)


def local(weight: Tensor) -> Tensor:
    """Return this rank's part of a weight, whose gradients are parts of a sum over ranks."""
    if not isinstance(weight, DTensor):
        return weight
    placements = [Partial() if one.is_replicate() else one for one in weight.placements]
    return weight.to_local(grad_placements=placements)
