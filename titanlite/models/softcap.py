"""A soft cap of the logits: cap * tanh(logits / cap), as in Gemma 2 (arXiv:2408.00118, section 2).

A model without one does not import this file.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor

from titanlite.models.autograd import fresh

if TYPE_CHECKING:
    from titanlite.loss import LossFunction
    from titanlite.models.layers import Llama


def capped(
    model: Llama, x: Tensor, labels: Tensor | None = None, loss: LossFunction | None = None
) -> Tensor:
    """Return the capped logits of the head of `model`; with labels its loss, which is that of
    capped logits.

    x: [batch, seq, dim]. labels, loss: as for `Llama.forward`.
    """
    cap = model.args.final_softcap
    if labels is None or loss is None:
        return soft_cap(model.output(x), cap)

    def of_capped(logits: Tensor, labels: Tensor) -> Tensor:
        return loss(soft_cap(logits, cap), labels)

    return model.output(x, labels, of_capped)


def soft_cap(logits: Tensor, cap: float) -> Tensor:
    """Return cap * tanh(logits / cap) in the dtype of the logits; computed in float32.

    logits: of any shape, also a DTensor that ranks divide: each works on its part. Keeps them for
    the backward.
    """
    if not isinstance(logits, DTensor):
        return _SoftCap.apply(logits, cap)
    part = _SoftCap.apply(logits.to_local(), cap)
    return DTensor.from_local(part, logits.device_mesh, logits.placements, run_check=False)


class _SoftCap(torch.autograd.Function):
    """Keeps its input; autograd would keep the tanh, in float32: twice the bytes of bf16."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, cap: float) -> Tensor:
        ctx.cap = cap
        ctx.save_for_backward(logits)
        tanh = _tanh(logits, cap)
        # Cast where it is written, with no pass of its own.
        result = tanh if logits.dtype == tanh.dtype else torch.empty_like(logits)
        return fresh(torch.mul(tanh, cap, out=result))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (logits,) = ctx.saved_tensors
        tanh = _tanh(logits, ctx.cap)
        # Near the cap the slope would be lost in the rounding of bf16. The kernel for GPUs computes
        # in the dtype of what it writes to, so that is float32 too.
        product = torch.ops.aten.tanh_backward.grad_input(grad, tanh, grad_input=tanh)
        return product.to(logits.dtype), None


def _tanh(logits: Tensor, cap: float) -> Tensor:
    """Return tanh(logits / cap) in float32, a new tensor."""
    # A divisor of one dimension decides the dtype of the quotient: no copy in float32 before.
    divisor = logits.new_full((1,), cap, dtype=torch.float32)
    return torch.div(logits, divisor).tanh_()
