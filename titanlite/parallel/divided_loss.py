"""Cross-entropy of logits that tensor-parallel ranks divide by vocabulary, computed in place.

torch's `loss_parallel` makes four tensors in float32 of the logits' size in its backward. This
function makes one and reuses it for the gradient. It takes 4 bytes a logit beside the logits, later
beside their gradient.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor

from titanlite.data.rows import IGNORE
from titanlite.regularized_loss import Objective


def divided_cross_entropy(logits: DTensor, labels: Tensor, objective: Objective) -> Tensor:
    """Return the float32 sum over valid tokens of -log p(label), with the gradient of `objective`.

    logits: [..., vocab], in equal parts of the vocabulary on a one-dimensional mesh. labels: [...]
    int64 of the whole vocabulary or `IGNORE`, the same on every rank. Every rank of the mesh calls
    it.
    """
    loss: Tensor = _DividedCrossEntropy.apply(logits, labels, objective)
    return loss


class _DividedCrossEntropy(torch.autograd.Function):
    """Keeps the exponentials of the shifted logits in float32, of which its backward makes the
    gradient.
    """

    @staticmethod
    def forward(ctx: Any, logits: DTensor, labels: Tensor, objective: Objective) -> Tensor:
        mesh = logits.device_mesh
        group = mesh.get_group()
        part = logits.to_local().flatten(0, -2)
        labels = labels.flatten()
        valid = labels != IGNORE
        place = labels - mesh.get_local_rank() * part.size(-1)
        mine = valid & (place >= 0) & (place < part.size(-1))
        place = place.where(mine, 0).unsqueeze(-1)

        values = part.to(torch.float32, copy=True)
        largest = values.amax(-1, keepdim=True)
        dist.all_reduce(largest, dist.ReduceOp.MAX, group)
        values -= largest
        target = values.gather(-1, place).squeeze(-1).where(mine, 0.0)
        values.exp_()
        sums = torch.stack([values.sum(-1), target])
        dist.all_reduce(sums, dist.ReduceOp.SUM, group)
        total, target = sums
        log_total = total.log()

        if ctx.needs_input_grad[0]:
            # Weight of each probability in the gradient of its token, from the z-loss.
            share = 1 + 2 * objective.z_loss * (log_total + largest.squeeze(-1))
            ctx.save_for_backward(values, share / total, valid, mine, place)
            ctx.logits, ctx.objective = _Layout(logits), objective
        return (log_total - target).where(valid, 0.0).sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[DTensor, None, None]:
        values, scale, valid, mine, place = ctx.saved_tensors
        layout: _Layout = ctx.logits
        smoothing = ctx.objective.label_smoothing
        weight = gradient * valid
        # In place: a second backward is an error, since a saved tensor has changed.
        values *= (weight * scale).unsqueeze(-1)
        of_target = values.gather(-1, place) - ((1 - smoothing) * weight * mine).unsqueeze(-1)
        values.scatter_(-1, place, of_target)
        if smoothing:
            values -= (weight * smoothing / layout.shape[-1]).unsqueeze(-1)
        return layout.like(values.to(layout.dtype)), None, None


class _Layout:
    def __init__(self, tensor: DTensor) -> None:
        self.mesh, self.placements = tensor.device_mesh, tensor.placements
        self.shape, self.stride, self.dtype = tensor.shape, tensor.stride(), tensor.dtype
        self.local_shape = tensor.to_local().shape

    def like(self, local: Tensor) -> DTensor:
        return DTensor.from_local(
            local.view(self.local_shape),
            self.mesh,
            self.placements,
            run_check=False,
            shape=self.shape,
            stride=self.stride,
        )
