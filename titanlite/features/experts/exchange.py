"""Rows of an MoE layer on their way to the ranks of their experts, and back.

A layer costs five all-to-alls in a step: one of counts, two of rows, and two of gradients.
The host reads the number of rows, since the size of the tensors depends on it. So it waits for the
device once per layer and micro-batch. Recomputation takes the numbers that the forward has read:
`save_sizes`, and the policy by operator of `titanlite.parallel.activation_checkpoint`, save them.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed._functional_collectives import all_to_all_single, wait_tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from titanlite.models.experts.grouped import EXPERT_KEY, inverse


class Route(NamedTuple):
    """How the rows of one layer travel."""

    #: Rows to and from each rank.
    sent: list[int]
    received: list[int]
    #: [rows received] int64: puts them in the order of the experts, and back.
    order: Tensor
    inverse: Tensor
    group: dist.ProcessGroup

    def move(self, rows: Tensor, there: bool) -> Tensor:
        """Move rows [rows, dim] to the ranks of their experts, or back to those of their tokens."""
        if there:
            return _all_to_all(rows, self.received, self.sent, self.group).index_select(
                0, self.order
            )
        return _all_to_all(rows.index_select(0, self.inverse), self.sent, self.received, self.group)


def _all_to_all(
    rows: Tensor, received: list[int] | None, sent: list[int] | None, group: dist.ProcessGroup
) -> Tensor:
    # As an operator that a policy of activation checkpointing can name.
    return wait_tensor(all_to_all_single(rows.contiguous(), received, sent, group))


@torch.library.custom_op("titanlite::sizes_on_host", mutates_args=())
def _on_host(sizes: Tensor) -> Tensor:
    """Copy sizes to the host, which waits. As an operator its result can be saved by activation
    checkpointing.
    """
    return sizes.to("cpu", copy=True)


@_on_host.register_fake
def _(sizes: Tensor) -> Tensor:
    return torch.empty_like(sizes, device="cpu")


class _Move(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, route: Route, there: bool) -> Tensor:
        ctx.route, ctx.there = route, there
        return route.move(rows, there)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return ctx.route.move(gradient, not ctx.there), None, None


def save_sizes(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Save how many rows go to each rank's experts, for which the host would wait again; recompute
    all else.
    """
    name = str(op)
    is_exchange = name == "_c10d_functional.all_to_all_single.default"
    has_counts = is_exchange and not args[0].is_floating_point()
    if has_counts or name == "titanlite.sizes_on_host.default":
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE


class Exchange:
    """Moves rows between the ranks of their tokens and those of their experts.

    All ranks call it together.
    """

    def __init__(self, mesh: DeviceMesh) -> None:
        self.group, self.ranks = mesh.get_group(), mesh.size()

    @staticmethod
    def contexts() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        contexts: tuple[AbstractContextManager[Any], AbstractContextManager[Any]]
        contexts = create_selective_checkpoint_contexts(save_sizes)
        return contexts

    @torch._disable_dynamo  # `torch.compiler.disable` would import the compiler now
    def dispatch(self, rows: Tensor, counts: Tensor) -> tuple[Tensor, Tensor, Route]:
        """Send rows [rows, dim], sorted by expert, to the ranks of their experts.

        counts: [experts] int64, of this rank's rows. Returns the rows for this rank's experts,
        sorted by expert, their counts [local experts], and the route for `combine`.
        """
        sent = counts.view(self.ranks, -1)
        received = _all_to_all(counts, None, None, self.group).view_as(sent)
        sizes = torch.stack((sent.sum(1), received.sum(1)))
        outward, inward = _on_host(sizes).tolist()
        experts = torch.arange(sent.size(1), dtype=EXPERT_KEY, device=counts.device)
        of_rows = experts.repeat(self.ranks).repeat_interleave(
            received.flatten(), output_size=sum(inward)
        )
        order = of_rows.argsort(stable=True)
        route = Route(outward, inward, order, inverse(order), self.group)
        return _Move.apply(rows, route, True), received.sum(0), route

    @torch._disable_dynamo
    def combine(self, rows: Tensor, route: Route) -> Tensor:
        """Return the experts' results [rows, dim], in the order of the rows of `dispatch`."""
        return _Move.apply(rows, route, False)
