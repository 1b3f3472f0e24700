"""The parts of torch's `fully_shard` that are not public, in one place.

`tests/parallel/test_fsdp.py` holds what they do on one rank and in prefetching, so that a torch
which lacks a name fails there.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, cast

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_api import ReduceScatter as ReduceScatter
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam as FSDPParam


def parameter_groups(model: nn.Module) -> Iterator[Any]:
    """Yield the groups of parameters (`FSDPParamGroup`) that `fully_shard` has made in a model."""
    for module in model.modules():
        if not isinstance(module, FSDPModule):
            continue
        state: Any = module._get_fsdp_state()
        if hasattr(state, "_fsdp_param_groups"):
            yield from state._fsdp_param_groups
        elif state._fsdp_param_group is not None:
            # torch 2.11: at most one group of a module.
            yield state._fsdp_param_group


def before_reduction(model: nn.Module, see: Callable[[nn.Parameter, Tensor], object]) -> None:
    """Let `see` have each parameter and its gradient on this rank, before ranks sum gradients."""

    def watched(group: Any, post_backward: Callable[..., None], *unused: Any) -> None:
        for parameter in group.fsdp_params:
            gathered = getattr(parameter, "_unsharded_param", None)
            if gathered is not None and gathered.grad is not None:
                see(parameter.sharded_param, gathered.grad)
        post_backward(*unused)

    for group in parameter_groups(model):
        if ranks_of(group) > 1:
            group.post_backward = partial(watched, group, group.post_backward)


def ranks_of(group: Any) -> int:
    """Return over how many ranks the gradients of a group of parameters are reduced."""
    # Not the mesh's tensor: a plan counts the operators of a step on fake tensors.
    return math.prod(group.mesh_info.mesh.shape)


def streams_of(model: nn.Module) -> Any:
    """Return the CUDA streams (`FSDPCommContext`) that the modules share from the first forward
    pass on.
    """
    return cast(FSDPModule, model)._get_fsdp_state()._comm_ctx


def shares_group(module: FSDPModule) -> bool:
    """Return whether `fully_shard` made one group of a module and others."""
    state: Any = module._get_fsdp_state()
    return len(state._modules) > 1


def prefetched_in_backward(module: FSDPModule) -> list[FSDPModule]:
    """Return the modules whose weights a module's backward gathers ahead; none: torch chooses."""
    state: Any = module._get_fsdp_state()
    return [one._modules[0] for one in state._states_to_backward_prefetch]
