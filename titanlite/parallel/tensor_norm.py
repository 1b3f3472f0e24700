"""RMSNorm over heads that the ranks of tensor parallelism divide, for `titanlite.parallel.tensor`.

A rank has some of a row's numbers. Forward and backward add one number per row over the ranks.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed._functional_collectives as collectives
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle

from titanlite.models.autograd import fresh
from titanlite.models.norms import WholeNorm


class DividedNorm(ParallelStyle):
    """Divides the weight of a `WholeNorm` as the heads, and its mean over the ranks."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        module.__class__ = DividedWholeNorm
        module.group_name = device_mesh.get_group().group_name  # type: ignore[assignment]
        module.ranks = device_mesh.size()  # type: ignore[assignment]
        return distribute_module(module, device_mesh, _divide)


def _divide(name: str, module: nn.Module, mesh: DeviceMesh) -> None:
    weight = distribute_tensor(module.get_parameter("weight"), mesh, [Shard(0)])
    module.register_parameter("weight", nn.Parameter(weight))


class DividedWholeNorm(WholeNorm):
    """A norm over the heads of all ranks. Made of a `WholeNorm` by `DividedNorm`."""

    group_name: str
    ranks: int

    def forward(self, x: Tensor) -> Tensor:
        """x: [..., heads of this rank, head_dim], plain; same shape back."""
        assert isinstance(self.weight, DTensor)
        weight = self.weight.to_local()
        assert self.eps is not None
        flat = x.flatten(-2)
        normed = _DividedRmsNorm.apply(flat, weight, self.eps, self.ranks, self.group_name)
        return normed.view_as(x)


class _DividedRmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float, ranks: int, group: str) -> Tensor:
        ctx.ranks = ranks
        ctx.group = group
        x32 = x.float()
        squares = x32.square().mean(-1, keepdim=True)
        rstd = (_mean_over(squares, ranks, group) + eps).rsqrt()
        ctx.save_for_backward(x, weight, rstd)
        return fresh((x32 * rstd).mul_(weight).to(x.dtype))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        x, weight, rstd = ctx.saved_tensors
        normed = x.float() * rstd
        grad = grad.float()
        grad_weight = (grad * normed).flatten(0, -2).sum(0).to(weight.dtype)
        scaled = grad * weight
        projection = (scaled * normed).mean(-1, keepdim=True)
        projection = _mean_over(projection, ctx.ranks, ctx.group)
        of_x = scaled.sub_(normed.mul_(projection)).mul_(rstd).to(x.dtype)
        return of_x, grad_weight, None, None, None


def _mean_over(means: Tensor, ranks: int, group: str) -> Tensor:
    total = collectives.all_reduce(means, "sum", group)  # type: ignore[arg-type]
    return collectives.wait_tensor(total) / ranks
