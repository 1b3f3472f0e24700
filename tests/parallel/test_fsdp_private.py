"""The private names of torch's `fully_shard` that titanlite uses on one rank.

A failure here says which name a new torch lacks: `titanlite/parallel/fsdp_one_rank.py` uses it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

from tests.support.pool import Pools
from titanlite.dist.dist_env import DistEnv
from titanlite.parallel.fsdp_private import (
    FSDPParam,
    ReduceScatter,
    parameter_groups,
    prefetched_in_backward,
    shares_group,
    streams_of,
)

#: Methods of `FSDPParam` that `_WholeParam` replaces: under another name torch would call its own.
REPLACED = [
    "all_gather_inputs",
    "init_all_gather_outputs",
    "free_unsharded_param",
    "reset_sharded_param",
    "accumulate_unsharded_grad_if_needed",
]
#: What `_WholeParam` asks of a parameter.
ASKED = [
    "_sharded_local_tensor",
    "_sharded_param_data",
    "all_gather_outputs",
    "device",
    "offload_to_cpu",
    "sharded_param",
    "to_sharded_dtensor",
]
#: What is asked of a group, or set.
ASKED_OF_GROUPS = [
    "fsdp_params",
    "_reduce_scatter_comm",
    "mesh_info",
    "gradient_divide_factor",
]
#: What it has from the first forward pass on.
ASKED_LATER = ["_unsharded_param", "orig_dtype", "param_dtype", "reduce_dtype"]


def _missing(owner: Any, names: list[str]) -> list[str]:
    return [f"{type(owner).__name__}.{name}" for name in names if not hasattr(owner, name)]


def test_torch_has_the_methods_that_are_replaced() -> None:
    lacks = [name for name in REPLACED if name not in vars(FSDPParam)]
    assert not lacks, f"torch's FSDPParam lacks {', '.join(lacks)}"
    assert isinstance(vars(FSDPParam).get("unsharded_grad_data"), property)
    assert "allocate" in dir(ReduceScatter)
    assert "__call__" in vars(ReduceScatter)


def _names_that_torch_lacks(world: DistEnv) -> list[str]:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    mesh = world.build_mesh()["dp_shard"]
    fully_shard(model[0], mesh=mesh)
    fully_shard(model, mesh=mesh)
    groups = list(parameter_groups(model))
    missing = _missing(streams_of(model), ["lazy_init"])
    if len(groups) != 2:
        missing.append(f"one group for each module: there are {len(groups)}")
    for group in groups:
        missing += _missing(group, ASKED_OF_GROUPS)
        for parameter in group.fsdp_params:
            missing += _missing(parameter, ASKED)
    missing += _missing(model._get_fsdp_state(), ["_modules", "_states_to_backward_prefetch"])
    if shares_group(model[0]) or prefetched_in_backward(model[0]):
        missing.append("a module without a group of others, and torch's own choice of gathers")
    loss = model(torch.ones(2, 8)).sum()
    missing += _missing(streams_of(model), ["reduce_scatter_stream"])
    for parameter in groups[0].fsdp_params:
        missing += _missing(parameter, ASKED_LATER)
    loss.backward()
    return missing


def test_torch_has_all_private_names_that_are_used(pool: Pools) -> None:
    (lacks,) = pool(1).run(_names_that_torch_lacks)
    assert not lacks, f"this torch lacks {', '.join(sorted(set(lacks)))}"
