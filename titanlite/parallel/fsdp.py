"""Per-parameter sharding with FSDP2's `fully_shard`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import Shard

from titanlite.dist import ParallelismError
from titanlite.parallel.submeshes import fsdp_mesh

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def apply_fsdp(  # noqa: PLR0913
    model: nn.Module,
    groups: Sequence[Sequence[str]],
    mesh: DeviceMesh,
    *,
    param_dtype: torch.dtype = torch.bfloat16,
    reduce_dtype: torch.dtype = torch.float32,
    reshard_after_forward: bool | int | None = None,
    prefetch: int = 0,
    cpu_offload: bool = False,
    average: bool = False,
    placement: Callable[[nn.Parameter], Any] | None = None,
) -> None:
    """Apply `fully_shard` to each group of modules, then to the root, in place.

    groups: names, in the order they last run (`titanlite.parallel.fsdp_groups`). A parameter is in
    one group only, so tied modules must share one. Modules in no group belong to the root.
    mesh: from `DistEnv.build_mesh`. One rank is sharded too, for the same mixed precision.
    reshard_after_forward: free gathered weights after forward. None: all but the last two groups. A
    number: keep them sharded over that many ranks.
    prefetch: groups whose all-gathers start before the one that computes; 0: torch's own choice.
    cpu_offload: keep parameters, gradients and optimizer state in host memory.
    average: reduce gradients to their mean over ranks, as DDP does. By default they are summed: the
    loss of `TrainStep` is already divided by the valid tokens of all ranks.
    placement: a `shard_placement_fn`, for parameters that other ranks have divided before; it
    excludes `average`.
    """
    if average and placement is not None:
        message = "gradients of parameters with a placement are summed, and average asks for a mean"
        raise ParallelismError(message)
    dp_mesh = fsdp_mesh(mesh)
    # Without a cast of inputs, which would round the fp32 RoPE tables that blocks receive.
    policy = MixedPrecisionPolicy(param_dtype, reduce_dtype, cast_forward_inputs=False)
    offloading = offloads(cpu_offload, mesh.device_type)
    place = placement or _stack_placement(dp_mesh)
    modules = _modules_of(model, groups)
    for index, group in enumerate(modules):
        # The backward needs the last block and the head first. To free them only to gather them
        # again at once would cost two all-gathers and save nothing at the memory peak.
        reshard = reshard_after_forward
        if reshard is None:
            reshard = index < len(modules) - 2
        fully_shard(
            group if len(group) > 1 else group[0],
            mesh=dp_mesh,
            mp_policy=policy,
            offload_policy=CPUOffloadPolicy() if offloading else OffloadPolicy(),
            reshard_after_forward=reshard,
            shard_placement_fn=place,
        )
    if not isinstance(model, FSDPModule):
        fully_shard(model, mesh=dp_mesh, mp_policy=policy)
    if prefetch and dp_mesh.size(-1) > 1:
        _set_prefetch(model, modules, prefetch)
    if not average and (placement is not None or dp_mesh.size() > 1):
        _sum_gradients(model)
    if placement is not None or dp_mesh.size() == 1:
        from titanlite.parallel.fsdp_one_rank import avoid_copies

        avoid_copies(model)


def _modules_of(model: nn.Module, groups: Sequence[Sequence[str]]) -> list[list[nn.Module]]:
    """Return the modules of each group; the root is the last one if it has parameters besides."""
    modules = [[model.get_submodule(name) for name in group] for group in groups]
    grouped: set[nn.Parameter] = set()
    for group in modules:
        for module in group:
            grouped.update(module.parameters())
    if any(parameter not in grouped for parameter in model.parameters()):
        modules.append([model])
    return modules


def _sum_gradients(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            # gloo has no pre-multiplied sum, which a divide factor alone would need.
            module.set_force_sum_reduction_for_comms(True)


def _stack_placement(dp_mesh: DeviceMesh) -> Callable[[nn.Parameter], Shard | None]:
    """Return a `shard_placement_fn` that cuts inside of matrices where a stack has too few for the
    ranks.

    torch would give each of 8 experts to one of 16 ranks, and nothing to the others.
    """
    # torch 2.11 and 2.12 refuse `size(-1)` of a mesh that was flattened.
    ranks = dp_mesh.mesh.size(-1)

    def place(parameter: nn.Parameter) -> Shard | None:
        if parameter.ndim < 3 or len(parameter) % ranks == 0:
            return None
        placements = getattr(parameter, "placements", ())
        divided_by_tensor = [p.dim for p in placements if isinstance(p, Shard)]
        for dim in range(1, parameter.ndim):
            if dim not in divided_by_tensor and parameter.size(dim) % ranks == 0:
                return Shard(dim)
        return None

    return place


def offloads(cpu_offload: bool, device_type: str) -> bool:
    """Whether parameters, gradients and optimizer state move to host memory: on a CPU they are
    there already.
    """
    return cpu_offload and device_type != "cpu"


def _set_prefetch(model: nn.Module, groups: Sequence[Sequence[nn.Module]], ahead: int) -> None:
    """Let each group start all-gathers of the `ahead` groups after it before it computes.

    groups: in the order they last run, which backward reverses.
    """
    position = {module: index for index, module in enumerate(model.modules())}

    def first_use(group: Sequence[nn.Module]) -> int:
        return min(position[module] for module in group)

    # Tied modules run early and late: in forward the first use of a group counts. torch keeps the
    # state of a group in its first module.
    forward = [cast(FSDPModule, group[0]) for group in sorted(groups, key=first_use)]
    backward = [cast(FSDPModule, group[0]) for group in reversed(groups)]
    for index in range(len(groups)):
        later = slice(index + 1, index + 1 + ahead)
        forward[index].set_modules_to_forward_prefetch(forward[later])
        backward[index].set_modules_to_backward_prefetch(backward[later])


def free_gathered(model: nn.Module) -> None:
    """Free gathered weights, which an optimizer or `full_tensor` must not take.

    A forward pass without a backward leaves some.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def set_gradient_sync(model: nn.Module, enabled: bool) -> None:
    """Let the next backward reduce gradients over ranks, or not (while accumulating)."""
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(enabled)
