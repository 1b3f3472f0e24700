"""Experts divided over ranks (Lepikhin et al. 2020).

    experts = expert_mesh(mesh, 4)
    apply_ep(model, experts["ep"])  # on the meta device, before everything that wraps modules
    apply_fsdp(model, groups, mesh, placement=expert_placement(experts))

These ranks are a factor of the ranks that share the weights, times those of tensor parallelism.
Each has its own tokens: its own text, or a part of a sequence. It holds some of the experts,
sends each row to the rank of its expert, and gets the result back. No token is dropped.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, cast

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from titanlite.dist import ParallelismError
from titanlite.dist.dist_env import MESH_DIMS
from titanlite.features.experts.exchange import Exchange
from titanlite.parallel.submeshes import fsdp_mesh

#: The dimension of the mesh whose ranks share the experts.
_EP = "ep"


def expert_mesh(mesh: DeviceMesh, ranks: int) -> DeviceMesh:
    """Divide the ranks with different tokens and the same experts: [expert_shard, ep], with
    replicas one dimension before.

    The `ranks` that share the experts are neighbours; those of `expert_shard` hold the same ones.
    It makes process groups: call it once.
    """
    if mesh["tp"].size() == 1:
        weights = fsdp_mesh(mesh)
        most = weights.mesh.size(-1)
        _check_divides(ranks, most)
        return weights._unflatten(weights.ndim - 1, (most // ranks, ranks), ("expert_shard", _EP))
    # Tensor-parallel ranks divide the sequence where the experts are, so each has tokens of its
    # own. They get a new mesh: DTensor uses a flattened one for its collectives, also where both
    # dimensions divide a weight unevenly, and then gathers wrong rows (torch 2.13).
    pipeline, replicas, *others = (mesh[name].size() for name in MESH_DIMS)
    most = math.prod(others)
    _check_divides(ranks, most)
    divided = DeviceMesh(
        mesh.device_type,
        mesh.mesh.view(pipeline, replicas, most // ranks, ranks),
        mesh_dim_names=("pp", "dp_replicate", "expert_shard", _EP),
    )
    if replicas == 1:
        return divided["expert_shard", _EP]
    return divided["dp_replicate", "expert_shard", _EP]


def _check_divides(ranks: int, most: int) -> None:
    if most % ranks:
        raise ParallelismError(f"{ranks} ranks cannot share the experts: they do not divide {most}")


def apply_ep(model: nn.Module, mesh: DeviceMesh) -> None:
    """Divide the experts of `model` over a one-dimensional mesh, in place, after tensor
    parallelism.

    Experts are modules with an attribute `exchange`, which becomes an `Exchange`. Their parameters
    [experts, …] are divided along the first dimension.
    """
    for name, module in model.named_modules():
        if not hasattr(module, "exchange"):
            continue
        for key, parameter in list(module.named_parameters(recurse=False)):
            if len(parameter) % mesh.size():
                raise ParallelismError(
                    f"{mesh.size()} ranks cannot share the {len(parameter)} experts of {name}"
                )
            whole = _whole(parameter, f"{name}.{key}")
            divided = distribute_tensor(whole, mesh, [Shard(0)], src_data_rank=None)
            setattr(module, key, nn.Parameter(divided, requires_grad=parameter.requires_grad))
        module.exchange = Exchange(mesh)


def _whole(parameter: nn.Parameter, name: str) -> Tensor:
    if not isinstance(parameter, DTensor):
        return parameter
    if not all(placement.is_replicate() for placement in parameter.placements):
        raise ParallelismError(
            f"tensor parallelism divides {name}, and expert parallelism shares whole experts: "
            'their kind in the tensor plan must be "whole"'
        )
    local: Tensor = parameter.detach().to_local()  # type: ignore[attr-defined]
    return local


def expert_placement(mesh: DeviceMesh) -> Callable[[nn.Parameter], Any]:
    """Return a `shard_placement_fn` that shards experts over a mesh of `expert_mesh` without its
    last dimension.

    Weights of both kinds share a group, so the exchange's wait for the host delays no all-gather.
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
    of_experts = mesh[_EP]
    ranks = mesh.size(-2)

    def place(parameter: nn.Parameter) -> Any:
        is_shared = isinstance(parameter, DTensor) and parameter.device_mesh == of_experts
        if not is_shared:
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
