"""Per-parameter sharding with FSDP2's `fully_shard`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from titanlite.config.plans import ShardPlan

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def shard(model: nn.Module, units: Sequence[Sequence[nn.Module]], mesh: DeviceMesh, plan: ShardPlan) -> None:
    """Apply `fully_shard` to each unit (one or more modules gathered together), then to the root, in place.

    units: in the order they last run; tied modules must share one, since a parameter belongs to one unit only.
    mesh: dimensions (dp_replicate, dp_shard). World size 1 is sharded too, so mixed precision is the same everywhere.

    Gradients are *summed* over ranks, not averaged: the loss is already divided by the global number of
    valid tokens. gloo has no pre-multiplied sum, which a divide factor alone would ask for.
    """
    policy = MixedPrecisionPolicy(
        param_dtype=DTYPES[plan.param_dtype],
        reduce_dtype=DTYPES[plan.reduce_dtype],
        # The embedding's output already has the parameters' dtype; casting every floating-point input would
        # round the fp32 RoPE tables that blocks are handed.
        cast_forward_inputs=False,
    )
    dp_mesh = mesh if mesh["dp_replicate"].size() > 1 else mesh["dp_shard"]
    for index, unit in enumerate(units):
        # The last block and the head are needed first in backward: freeing them only to gather them again
        # at once would cost two all-gathers and save nothing at the memory peak.
        default = index < len(units) - 2
        reshard = default if plan.reshard_after_forward is None else plan.reshard_after_forward
        modules = list(unit)
        fully_shard(
            modules if len(modules) > 1 else modules[0],
            mesh=dp_mesh,
            mp_policy=policy,
            reshard_after_forward=reshard,
        )
    fully_shard(model, mesh=dp_mesh, mp_policy=policy)
    if mesh.size() == 1:
        return  # nothing is reduced, and dividing by 1.0 would copy every gradient once more
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)


def set_gradient_sync(model: nn.Module, enabled: bool) -> None:
    """Whether the next backward reduces gradients over ranks (False while accumulating)."""
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(enabled)
