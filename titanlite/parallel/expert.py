"""Expert parallelism: ranks that share the experts of a mixture, without dropped tokens (Lepikhin
et al. 2020).

    experts = expert_mesh(mesh, 4)
    apply_ep(model, experts["ep"])  # on the meta device, before everything that wraps modules
    apply_fsdp(model, groups, mesh, experts=experts)

These ranks are a factor of the ranks that share the weights, and each reads its own text. It holds
some of the experts, sends each row to the rank of its expert, and gets the result back. A layer
costs five all-to-alls in a step: one of counts, two of rows, and two of gradients; recomputation
repeats the first three. The host reads the number of rows, which the size of the tensors depends
on: once per layer and forward pass it waits for the device.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_to_all_single, wait_tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from titanlite.parallel import ParallelismError
from titanlite.parallel.meshes import fsdp_mesh


def expert_mesh(mesh: DeviceMesh, ranks: int) -> DeviceMesh:
    """Divide the ranks that share the weights: return [expert_shard, ep], or with replicas one
    dimension before them.

    mesh: from `DistEnv.build_mesh`. ranks: those that share the experts, neighbours in the mesh.
    Ranks of `expert_shard` hold the same experts and shard them. It makes process groups: call it
    once.
    """
    weights = fsdp_mesh(mesh)
    if weights.size(-1) % ranks:
        raise ParallelismError(
            f"{ranks} ranks cannot share the experts: they do not divide {weights.size(-1)}"
        )
    return weights._unflatten(
        weights.ndim - 1, (weights.size(-1) // ranks, ranks), ("expert_shard", "ep")
    )


def apply_ep(model: nn.Module, mesh: DeviceMesh) -> None:
    """Divide the experts of `model` over the ranks of `mesh` (one-dimensional), in place.

    Experts are modules with an attribute `exchange`, whose parameters [experts, …] they divide
    along the first dimension. The attribute becomes an `Exchange`. A pipeline stage may have none.
    """
    for name, module in model.named_modules():
        if not hasattr(module, "exchange"):
            continue
        for key, parameter in list(module.named_parameters(recurse=False)):
            if len(parameter) % mesh.size():
                raise ParallelismError(
                    f"{mesh.size()} ranks cannot share the {len(parameter)} experts of {name}"
                )
            divided = distribute_tensor(parameter, mesh, [Shard(0)], src_data_rank=None)
            setattr(module, key, nn.Parameter(divided, requires_grad=parameter.requires_grad))
        module.exchange = Exchange(mesh)


def has_exchange(model: nn.Module) -> bool:
    """Return whether other ranks hold some of the experts in this module."""
    return any(getattr(module, "exchange", None) is not None for module in model.modules())


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


class _Move(torch.autograd.Function):
    """`Route.move`: a permutation over all ranks, whose gradient goes the way back."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, route: Route, there: bool) -> Tensor:
        ctx.route, ctx.there = route, there
        return route.move(rows, there)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return ctx.route.move(gradient, not ctx.there), None, None


class Exchange:
    """Moves rows between the ranks of their tokens and those of their experts.

    All ranks call it together.
    """

    def __init__(self, mesh: DeviceMesh) -> None:
        self.group, self.ranks = mesh.get_group(), mesh.size()

    @torch._disable_dynamo  # `torch.compiler.disable` would import the compiler now
    def dispatch(self, rows: Tensor, counts: Tensor) -> tuple[Tensor, Tensor, Route]:
        """Send rows to the ranks of their experts.

        rows: [rows, dim], sorted by expert. counts: [experts] int64, of this rank's rows. Returns
        the rows for this rank's experts, sorted by expert, their counts [local experts], and the
        route for `combine`.
        """
        sent = counts.view(self.ranks, -1)
        received = _all_to_all(counts, None, None, self.group).view_as(sent)
        outward, inward = torch.stack(
            (sent.sum(1), received.sum(1))
        ).tolist()  # waits for the device
        experts = torch.arange(sent.size(1), device=counts.device).repeat(self.ranks)
        order = experts.repeat_interleave(received.flatten(), output_size=sum(inward)).argsort(
            stable=True
        )
        route = Route(outward, inward, order, order.argsort(), self.group)
        return _Move.apply(rows, route, True), received.sum(0), route

    @torch._disable_dynamo
    def combine(self, rows: Tensor, route: Route) -> Tensor:
        """Return the experts' results [rows, dim], in the order in which `dispatch` took their
        rows.
        """
        return _Move.apply(rows, route, False)


def expert_placement(mesh: DeviceMesh) -> Callable[[nn.Parameter], Any]:
    """Return a `shard_placement_fn` that shards experts over `mesh` without its last dimension,
    others as usual.

    One group then gathers weights of both kinds, so the exchange's wait for the host delays no
    all-gather.
    """
    try:
        from torch.distributed.fsdp._fully_shard._fsdp_common import ShardPlacementResult
        from torch.distributed.fsdp._fully_shard._fsdp_init import _get_mesh_info
    except ImportError:
        raise ParallelismError("expert parallelism needs torch 2.12 or later") from None
    assert mesh.mesh_dim_names is not None
    info = cast(
        Any, _get_mesh_info(mesh[mesh.mesh_dim_names[:-1]])
    )  # one object for all parameters, as torch asks
    ranks = mesh.size(-2)

    def place(parameter: nn.Parameter) -> Any:
        if not isinstance(parameter, DTensor):
            return None
        # The ranks of `ep` divide dimension 0. Two divisions of one dimension interleave, which few
        # operators know.
        dim = next(
            (dim for dim in range(1, parameter.ndim) if parameter.size(dim) % ranks == 0), None
        )
        if dim is None:
            shape = " x ".join(map(str, parameter.shape))
            raise ParallelismError(
                f"{ranks} ranks cannot share experts [{shape}]: they divide neither of the last two"
            )
        return ShardPlacementResult(Shard(dim), info)

    return place
