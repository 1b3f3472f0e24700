"""`gelu_mul` as a single autograd node, as `titanlite.models.autograd.silu_mul`."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from titanlite.models.autograd import fresh


class _GeluMul(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, x: Tensor) -> Tensor:
        ctx.save_for_backward(gate, x)
        return fresh(F.gelu(gate, approximate="tanh").mul_(x))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        gate, x = ctx.saved_tensors
        of_gate = torch.ops.aten.gelu_backward(grad * x, gate, approximate="tanh")
        return of_gate, F.gelu(gate, approximate="tanh").mul_(grad)


def gelu_mul(gate: Tensor, x: Tensor) -> Tensor:
    """Return gelu(gate) * x with the tanh approximation (GeGLU, Shazeer 2020). Keeps gate and x."""
    return _GeluMul.apply(gate, x)
