"""Weights that FSDP gathers in float8: torchao wraps each of them, and computes its scale.

after_update = ScalePrecompute(model, mesh)   # for a step, once there is memory
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule

from titanlite.dist.local_parts import wrapper_of
from titanlite.features.float8.package import float8_linears, torchao
from titanlite.parallel.submeshes import fsdp_mesh


class ScalePrecompute:
    """Computes the scales of all weights that are gathered in float8. Call it after each update.

    One all-reduce replaces that of each weight and gather. The scales are the same.
    """

    def __init__(self, model: nn.Module, mesh: DeviceMesh) -> None:
        shards = fsdp_mesh(mesh)
        self._group = shards.get_group(shards.ndim - 1)
        self._linears = float8_linears(model)

    @torch.no_grad()
    def __call__(self) -> None:
        wrappers = []
        for linear in self._linears:
            wrapper = wrapper_of(linear.weight)
            if wrapper is not None:
                wrappers.append(wrapper)
        if not wrappers:
            return
        # The largest absolute value, without a copy of the weights.
        largest = torch.stack(torch._foreach_norm([w._tensor for w in wrappers], float("inf")))
        dist.all_reduce(largest, dist.ReduceOp.MAX, self._group)
        dtype = self._linears[0].config.cast_config_weight.target_dtype
        scales = torchao().float8_utils.amax_to_scale(largest, dtype)
        for wrapper, scale in zip(wrappers, scales.unbind(), strict=True):
            wrapper._precomputed_scale = scale


def forget_scale(weight: Tensor) -> None:
    """Forget the scale that `ScalePrecompute` found for a weight."""
    wrapper = wrapper_of(weight)
    if wrapper is not None:
        wrapper._precomputed_scale = None


def gather_as_bytes(model: nn.Module) -> None:
    """Let FSDP gather float8 weights as bytes after `apply_fsdp`, since gloo knows no float8.

    FSDP itself does so in groups that mix dtypes.
    """
    from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather

    class GatherBytes(DefaultAllGather):
        def __call__(
            self,
            output_tensor: Tensor,
            input_tensor: Tensor,
            group: dist.ProcessGroup,
            async_op: bool = False,
        ) -> dist.Work | None:
            if input_tensor.dtype.itemsize == 1:
                output_tensor = output_tensor.view(torch.uint8)
                input_tensor = input_tensor.view(torch.uint8)
            return super().__call__(output_tensor, input_tensor, group, async_op)

    for module in model.modules():
        if not isinstance(module, FSDPModule):
            continue
        groups = getattr(module._get_fsdp_state(), "_fsdp_param_groups", [])
        # A module whose parameters have two meshes has experts, which are not in float8.
        if len(groups) < 2:
            module.set_custom_all_gather(GatherBytes())
