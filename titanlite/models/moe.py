"""A mixture of experts in place of a block's feed-forward (Shazeer et al. 2017; Mixtral, Jiang et
al. 2024).

Each token goes to `top_k` of the experts, and no token is dropped (MegaBlocks, Gale et al. 2022).
Tokens are sorted by expert, so that `torch.nn.functional.grouped_mm` multiplies the rows of each
expert by its matrix in one kernel. Counts stay on the device: the host waits for nothing. (float32
on a GPU has no such kernel; torch then loops over the experts and waits.) Every sum has a fixed
order, so results repeat to the last bit.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor

from titanlite.models.autograd import fresh, silu_mul
from titanlite.models.layers import Block, Llama

if TYPE_CHECKING:
    from titanlite.models.mixtral import MixtralArgs


class _Dispatch(torch.autograd.Function):
    """Copies each token's row to the places of its experts.

    The backward gathers, so its sums have a fixed order.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, places: Tensor) -> Tensor:
        ctx.save_for_backward(places)
        return x[order // places.size(1)]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (places,) = ctx.saved_tensors
        return grad[places].sum(1), None, None


class _Combine(torch.autograd.Function):
    """Adds up the results of each token's experts, weighted, in float32; one of `top_k` at a time
    is in float32.
    """

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


class _AddLoss(torch.autograd.Function):
    """Returns x, and gives `loss` the gradient 1, as if it were added to the loss of the run.

    So neither blocks nor pipeline stages have to hand the loss on, and a recomputed block adds it
    once.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor) -> Tensor:
        return fresh(x.view_as(x))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        return grad, grad.new_ones(())


@torch.library.custom_op("titanlite::grouped_mm", mutates_args=())
def _grouped_mm_any(a: Tensor, b: Tensor, ends: Tensor) -> Tensor:
    """torch's `grouped_mm` for dtypes that its shape function refuses, although its kernel takes
    them.

    Without it no float32 model could be traced or compiled.
    """
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
    """Return the rows of each group times its matrix.

    a: [rows, K], sorted by group; b: [groups, K, N]; ends: [groups] int32, where each group ends.
    Returns [rows, N].
    """
    return (
        F.grouped_mm(a, b, offs=ends) if a.dtype == torch.bfloat16 else _grouped_mm_any(a, b, ends)
    )


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


class Experts(nn.Module):
    """SwiGLU feed-forwards of equal size, each with its own matrices in one stack."""

    def __init__(self, n_experts: int, dim: int, width: int) -> None:
        super().__init__()
        self.w1 = nn.Parameter(torch.empty(n_experts, width, dim))
        self.w2 = nn.Parameter(torch.empty(n_experts, dim, width))
        self.w3 = nn.Parameter(torch.empty(n_experts, width, dim))
        #: Set where ranks hold different experts; the parameters are then this rank's.
        self.exchange: Exchange | None = None

    def forward(self, x: Tensor, counts: Tensor) -> Tensor:
        """x: [tokens * top_k, dim], sorted by expert; counts: [experts] int64, rows of each.

        Returns x's shape.
        """
        state = None
        if self.exchange is not None:
            x, counts, state = self.exchange.dispatch(x, counts)
        ends = counts.cumsum(0).to(torch.int32)
        w1, w2, w3 = (_local(w).transpose(1, 2) for w in (self.w1, self.w2, self.w3))
        inner = silu_mul(grouped_mm(x, w1, ends), grouped_mm(x, w3, ends))
        y = grouped_mm(inner, w2, ends)
        if self.exchange is None:
            return y
        return self.exchange.combine(y, state)


def _local(weight: Tensor) -> Tensor:
    return weight.to_local() if isinstance(weight, DTensor) else weight


class MoE(nn.Module):
    """A router and its experts.

    The router's losses get their gradients here; the model's output does not contain them. Both are
    means over the tokens of a step and over layers, as `transformers` weights them.

    step_tokens: tokens of a step over all ranks and micro-batches, for a loss that is divided by as
    many. 0: the router's losses are means over the tokens of each call.
    record: [experts + 3] float64 on the device, or None. Training calls add to it each expert's
    rows, their tokens, and the sums over tokens of load-balancing loss and z-loss. A block that
    runs again for its backward adds all of them again, so only their ratios mean something.
    """

    def __init__(self, args: MixtralArgs) -> None:
        super().__init__()
        self.top_k = args.top_k
        self.gate = nn.Linear(args.dim, args.n_experts, bias=False)
        self.experts = Experts(args.n_experts, args.dim, args.ffn_width)
        self.aux_weight, self.z_weight = args.aux_loss / args.n_layers, args.z_loss / args.n_layers
        self.step_tokens = 0
        self.record: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        """x: [batch, seq, dim] → [batch, seq, dim]."""
        tokens = x.flatten(0, 1)
        logits = self.gate(tokens).float()
        probabilities = logits.softmax(-1)
        weights, chosen = probabilities.topk(self.top_k, -1)  # [tokens, top_k]
        # Compared and summed: counting by atomic additions is neither deterministic nor faster.
        counts = (chosen.flatten()[:, None] == torch.arange(logits.size(1), device=x.device)).sum(0)
        if torch.is_grad_enabled():
            weights = self._add_losses(weights, logits, probabilities, counts)
        weights = weights / weights.sum(-1, keepdim=True)
        order = chosen.flatten().argsort(stable=True)
        places = torch.empty_like(order).scatter_(
            0, order, torch.arange(len(order), device=x.device)
        )
        places = places.view_as(chosen)  # of each token's rows among the sorted ones
        y = self.experts(_Dispatch.apply(tokens, order, places), counts)
        return _Combine.apply(y, weights, order, places).view_as(x)

    def _add_losses(
        self, weights: Tensor, logits: Tensor, probabilities: Tensor, counts: Tensor
    ) -> Tensor:
        """Return `weights` with the gradients of the router's losses, and record both."""
        # Sums over tokens, like the loss of the run. Load balancing: Switch Transformer (Fedus et
        # al. 2021), equations 4 to 6. It has the shares of all top_k choices: top_k where all
        # experts are equal. z: ST-MoE (Zoph et al. 2022).
        balance = probabilities.sum(0) @ (counts.float() * (counts.numel() / len(logits)))
        z = logits.logsumexp(-1).square().sum()
        if self.aux_weight or self.z_weight:
            loss = (self.aux_weight * balance + self.z_weight * z) / (
                self.step_tokens or len(logits)
            )
            weights = _AddLoss.apply(weights, loss)
        if self.record is not None:
            with torch.no_grad():
                tokens = balance.new_full((), len(logits))
                self.record.add_(torch.cat([counts, torch.stack([tokens, balance, z])]))
        return weights


class MixtralBlock(Block):
    """A block whose feed-forward is a mixture of experts."""

    feed_forward_class = MoE


class Mixtral(Llama):
    """The decoder of family mixtral."""

    block_class = MixtralBlock
