"""`silu_mul` and `RMSNorm` as single autograd nodes.

Autograd would keep every intermediate result of the separate operations. These keep the inputs
alone and compute the rest again: less memory, for some element-wise work.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

#: torch 2.11 compiles a Function without gradients if its result was computed in place, or is a
#: view or another name of what it was computed from.
_NEEDS_COPY = torch.__version__ < "2.12"


def fresh(result: Tensor) -> Tensor:
    """Return a Function's result with gradients under the compiler, which drops the copy."""
    if _NEEDS_COPY and torch.compiler.is_compiling():
        return result.clone()
    return result


class _SiluMul(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, x: Tensor) -> Tensor:
        ctx.save_for_backward(gate, x)
        return fresh(F.silu(gate).mul_(x))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        gate, x = ctx.saved_tensors
        return torch.ops.aten.silu_backward(grad * x, gate), F.silu(gate).mul_(grad)


def silu_mul(gate: Tensor, x: Tensor) -> Tensor:
    """Return silu(gate) * x. Keeps gate and x for backward: two tensors instead of three."""
    return _SiluMul.apply(gate, x)


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
        x32 = x.float()
        rstd = x32.square().mean(-1, keepdim=True).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, rstd)
        normed = x32 * rstd
        return fresh((normed if weight is None else normed.mul_(weight)).to(x.dtype))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, None]:
        x, weight, rstd = ctx.saved_tensors
        normed = x.float() * rstd
        grad = grad.float()
        grad_weight = None
        if weight is not None:
            grad_weight = (grad * normed).flatten(0, -2).sum(0).to(weight.dtype)
        scaled = grad * (1.0 if weight is None else weight)
        projection = (scaled * normed).mean(-1, keepdim=True)
        return scaled.sub_(normed.mul_(projection)).mul_(rstd).to(x.dtype), grad_weight, None


def rms_norm(x: Tensor, weight: Tensor | None, eps: float | None) -> Tensor:
    """Return x: [..., dim], normalised by its root mean square, times weight: [dim] or None."""
    return _RmsNorm.apply(x, weight, eps)


class RMSNorm(nn.RMSNorm):
    """RMSNorm (Zhang and Sennrich 2019): torch's fused kernel on GPUs, elsewhere one autograd node.

    x: [..., dim]; computed in fp32. Keeps x and one number per row for backward.
    """

    def forward(self, x: Tensor) -> Tensor:
        if x.device.type == "cuda":
            return super().forward(x)
        return rms_norm(x, self.weight, self.eps)
