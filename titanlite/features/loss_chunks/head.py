"""A head that computes the loss in chunks.

With a large vocabulary the logits and their gradients are most of a step's memory peak.

    # on the meta device, before tensor parallelism, `torch.compile` and `fully_shard`
    chunk_head(model, 8)
    loss = batch_loss(model, tokens, labels, cross_entropy_sum)

`torch.nn.functional.linear_cross_entropy` (2.13) also works in chunks. In bf16 it rounds the loss
to bf16 (relative error 2e-4 to 1e-2; here 3e-6). It takes neither sharded logits nor another loss.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_module
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle
from torch.distributed.tensor.placement_types import Placement

from titanlite.loss import LossFunction
from titanlite.parallel.feature_linear import FeatureLinear


def chunk_head(model: nn.Module, chunks: int, head_name: str = "output") -> None:
    """Let `model` compute its loss in at most `chunks` pieces of the tokens, in place; names and
    weights stay.

    The model hands `labels` and `loss` on to its head and returns the head's result, as
    `titanlite.models.layers.Llama` does. So `fully_shard` gathers the head's weights once. Of a
    pipeline: for every stage.

    Raises ValueError if chunks is below 1, the model takes no labels, or the head is no linear
    without bias, as after `fully_shard` or in float8.
    """
    if chunks < 1:
        raise ValueError(f"a loss cannot be computed in {chunks} chunks")
    if not {"labels", "loss"} <= inspect.signature(model.forward).parameters.keys():
        raise ValueError(
            "a loss in chunks needs a model that takes labels and loss and hands them to its "
            f"head. The forward of {type(model).__name__} does not"
        )
    head: Any = dict(model.named_modules()).get(head_name)
    if head is not None:
        if type(head) is not nn.Linear or head.bias is not None:
            raise ValueError(
                "the loss is computed in chunks by a head that is a plain linear without bias, "
                f"and this is {head}. Call chunk_head before fully_shard, and leave the head as "
                "it is"
            )
        head.__class__ = ChunkedHead
        head.chunks = chunks
    model.loss_chunks = chunks  # type: ignore[assignment]


class ChunkedHead(nn.Linear, FeatureLinear):
    """A head that computes the loss too, made of a linear by `chunk_head`."""

    chunks: int
    #: How logits are laid out over the ranks of tensor parallelism; None without it. Set by
    #: `apply_tp`.
    logits: Placement | None = None

    def forward(
        self, x: Tensor, labels: Tensor | None = None, loss: LossFunction | None = None
    ) -> Tensor:
        """Return the loss as a scalar; without labels the logits.

        x: [batch, seq, dim], under tensor parallelism this rank's part of each sequence (a DTensor
        or plain); labels: [batch, seq] int64, whole.
        """
        weight = self.weight
        if self.logits is None:
            if labels is None or loss is None:
                return super().forward(x)
            return _chunked(x, weight, labels, loss, self.chunks)
        assert isinstance(weight, DTensor)
        mesh = weight.device_mesh
        if not isinstance(x, DTensor):
            x = DTensor.from_local(x, mesh, [Shard(1)], run_check=False)
        # Gathered once for all chunks; so is its gradient reduced once, as the sum of every rank's
        # part.
        whole = x.redistribute(placements=[Replicate()])
        if labels is None or loss is None:
            return F.linear(whole, weight)
        local = whole.to_local(grad_placements=[Partial()])
        return _chunked(
            local, weight.to_local(), labels, _divided(loss, weight, self.logits), self.chunks
        )

    def tensor_style(self, kind: str, output: Placement, mesh: DeviceMesh) -> ParallelStyle | None:
        if kind != "head":
            return None
        return _DividedHead(output_layouts=output)


class _DividedHead(ColwiseParallel):
    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        (module.logits,) = self.output_layouts  # type: ignore[assignment]
        return distribute_module(module, device_mesh, self._partition_linear_fn)


def _divided(loss: LossFunction, weight: DTensor, layout: Placement) -> LossFunction:
    mesh = weight.device_mesh

    def of_part(logits: Tensor, labels: Tensor) -> Tensor:
        whole = DTensor.from_local(logits, mesh, [Shard(-1)], run_check=False)
        return loss(whole.redistribute(placements=[layout]), labels)

    return of_part


def _chunked(x: Tensor, weight: Tensor, labels: Tensor, loss: LossFunction, chunks: int) -> Tensor:
    """x: [batch, seq, dim], weight: [vocab, dim], labels: [batch, seq]."""
    targets = labels.flatten()
    wanted = (_wants_gradient(x), _wants_gradient(weight))
    pieces = min(chunks, len(targets))
    return _ChunkedLoss.apply(x.flatten(0, 1), weight, targets, loss, pieces, wanted)


def _wants_gradient(tensor: Tensor) -> bool:
    return torch.is_grad_enabled() and tensor.requires_grad


class _ChunkedLoss(torch.autograd.Function):
    """Loss and gradients chunk by chunk, so that only one chunk's logits exist at a time.

    With gradients computed beside the loss no product is computed twice, and what stays is as large
    as the inputs.
    """

    @staticmethod
    def forward(  # noqa: PLR0913
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        labels: Tensor,
        loss: LossFunction,
        chunks: int,
        wanted: tuple[bool, bool],
    ) -> Tensor:
        total = torch.zeros((), dtype=torch.float32, device=x.device)
        of_x = torch.empty_like(x) if wanted[0] else None
        # In float32, so that a chunk's part is not rounded away in the sum of all.
        of_weight = torch.zeros_like(weight, dtype=torch.float32) if wanted[1] else None
        # Equal chunks, or two sizes that differ by one: of a compiled loss there are one or two
        # graphs.
        parts = zip(x.tensor_split(chunks), labels.tensor_split(chunks), strict=True)
        begin = 0
        for rows, targets in parts:
            part, gradient = _of_chunk(rows, weight, targets, loss, any(wanted))
            total += part
            if of_x is not None:
                torch.mm(gradient, weight, out=of_x[begin : begin + len(rows)])
            if of_weight is not None and of_weight.dtype == weight.dtype:
                torch.addmm(of_weight, gradient.t(), rows, out=of_weight)
            elif of_weight is not None and x.is_cuda:
                # cuBLAS adds products of bf16 to float32: no chunk's product in bf16, and no pass
                # to add it.
                torch.addmm(of_weight, gradient.t(), rows, out_dtype=torch.float32, out=of_weight)
            elif of_weight is not None:
                of_weight += gradient.t() @ rows
            begin += len(rows)
            # Before the next chunk's logits.
            del gradient
        if of_weight is not None:
            of_weight = of_weight.to(weight.dtype)
        ctx.save_for_backward(of_x, of_weight)
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        # Not in place: a pipeline that splits its backward comes twice, once for the input and once
        # for the weight.
        of_x, of_weight = ctx.saved_tensors
        if of_x is not None:
            of_x = of_x * gradient
        if of_weight is not None:
            of_weight = of_weight * gradient
        return of_x, of_weight, None, None, None, None


def _of_chunk(
    rows: Tensor, weight: Tensor, labels: Tensor, loss: LossFunction, differentiate: bool
) -> tuple[Tensor, Tensor]:
    """A chunk's loss, and its gradient for the logits [tokens, vocab] (else the logits themselves).

    In a function, so that all else of that size is gone when it returns.
    """
    logits = rows @ weight.t()
    if not differentiate:
        return loss(logits[None], labels[None]), logits
    with torch.enable_grad():
        part = loss(logits.requires_grad_()[None], labels[None])
    # In this thread: that of a GPU may still hold logits and gradient when the next chunk begins.
    with torch.autograd.set_multithreading_enabled(False):
        (gradient,) = torch.autograd.grad(part, logits)
    return part.detach(), gradient
