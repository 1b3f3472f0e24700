"""Per-parameter sharding with FSDP2's `fully_shard`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from titanlite.config.plans import ShardPlan

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def shard(
    model: nn.Module, units: Sequence[Sequence[str]], mesh: DeviceMesh, plan: ShardPlan, average: bool = False
) -> None:
    """Apply `fully_shard` to each unit (names of modules gathered together), then to the root, in place.

    units: in the order they last run (see `titanlite.parallel.units`); tied modules must share one, since a parameter
    belongs to one unit only. What is in none belongs to the root.
    mesh: of `World.build_mesh`. World size 1 is sharded too, so mixed precision is the same everywhere.

    average: whether gradients are the mean over the ranks of `fsdp_mesh`, as with DDP. By default they are their *sum*,
    which `train_step` needs: its loss is already divided by the number of valid tokens on all ranks. With a loss that
    each rank averages over its own tokens, the sum is as many times too large as there are ranks: set average=True.
    """
    policy = MixedPrecisionPolicy(
        param_dtype=DTYPES[plan.param_dtype],
        reduce_dtype=DTYPES[plan.reduce_dtype],
        # The embedding's output already has the parameters' dtype; casting every floating-point input would
        # round the fp32 RoPE tables that blocks are handed.
        cast_forward_inputs=False,
    )
    dp_mesh = fsdp_mesh(mesh)
    groups = [[model.get_submodule(name) for name in unit] for unit in units]
    in_units = {parameter for group in groups for module in group for parameter in module.parameters()}
    if any(parameter not in in_units for parameter in model.parameters()):
        groups.append([model])
    for index, group in enumerate(groups):
        # The last block and the head are needed first in backward: freeing them only to gather them again
        # at once would cost two all-gathers and save nothing at the memory peak.
        default = index < len(groups) - 2
        fully_shard(
            group if len(group) > 1 else group[0],
            mesh=dp_mesh,
            mp_policy=policy,
            offload_policy=CPUOffloadPolicy() if offloads(plan, mesh.device_type) else OffloadPolicy(),
            reshard_after_forward=default if plan.reshard_after_forward is None else plan.reshard_after_forward,
        )
    if not isinstance(model, FSDPModule):
        fully_shard(model, mesh=dp_mesh, mp_policy=policy)
    if plan.prefetch and dp_mesh.size(-1) > 1:
        _prefetch(model, groups, plan.prefetch)
    if mesh.size() == 1 or average:
        return  # on one rank nothing is reduced, and dividing by 1.0 would copy every gradient once more
    # gloo has no pre-multiplied sum, which a divide factor alone would ask for.
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)


def fsdp_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """The ranks over which each weight is sharded: [shard], or [replicate, shard] where there are copies.

    Ranks that share a sequence hold the same weights too, so these are sharded over them as well.
    """
    if mesh["cp"].size() > 1:
        shard_mesh = mesh["dp_shard", "cp"]._flatten("dp_shard_cp")
        # Named slices of what was flattened are deprecated; this is what torch offers in their place.
        return (
            DeviceMesh._concatenate([mesh["dp_replicate"], shard_mesh])
            if mesh["dp_replicate"].size() > 1
            else shard_mesh
        )
    return mesh["dp_replicate", "dp_shard"] if mesh["dp_replicate"].size() > 1 else mesh["dp_shard"]


def offloads(plan: ShardPlan, device_type: str) -> bool:
    """Whether parameters, gradients and optimizer state are kept in host memory. On a CPU they are there already."""
    return plan.cpu_offload and device_type != "cpu"


def _prefetch(model: nn.Module, groups: Sequence[Sequence[nn.Module]], ahead: int) -> None:
    """Let each unit start the all-gathers of the `ahead` units after it before it computes, forward and backward.

    groups: modules of each unit, in the order they last run; backward takes them from the end.
    """
    position = {module: index for index, module in enumerate(model.modules())}
    # Tied modules run early and late: what counts in forward is when a unit is first needed.
    forward = _fsdp(sorted(groups, key=lambda group: min(position[module] for module in group)))
    backward = _fsdp(groups)[::-1]
    for index in range(len(groups)):
        forward[index].set_modules_to_forward_prefetch(list(forward[index + 1 : index + 1 + ahead]))
        backward[index].set_modules_to_backward_prefetch(list(backward[index + 1 : index + 1 + ahead]))


def _fsdp(groups: Sequence[Sequence[nn.Module]]) -> list[FSDPModule]:
    """One module of each unit, which stands for all of it."""
    return [cast(FSDPModule, group[0]) for group in groups]


def set_gradient_sync(model: nn.Module, enabled: bool) -> None:
    """Whether the next backward reduces gradients over ranks (False while accumulating)."""
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(enabled)
