"""Converted linears under tensor parallelism, by torchao's styles."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, cast

import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel
from torch.distributed.tensor.placement_types import Placement, Shard

from titanlite.features.float8.package import torchao

#: Kinds of a plan of tensor parallelism that torchao has styles for.
KINDS = ("colwise", "gathered", "rowwise")


def sends_float8(mesh: DeviceMesh) -> bool:
    """Whether ranks can send each other float8 tensors; gloo cannot, and casts what was sent.

    The scale is that of all parts, so the numbers are the same.
    """
    return not (mesh.device_type == "cpu" and dist.get_backend(mesh.get_group()) == "gloo")


def float8_style(kind: str, output: Placement, mesh: DeviceMesh) -> ParallelStyle:
    """Return torchao's style that divides a converted linear. kind: one of `KINDS`. output:
    placement of a rowwise linear's output.
    """
    parallel = torchao().float8_tensor_parallel
    gathered, rowwise = parallel.Float8ColwiseParallel, parallel.Float8RowwiseParallel
    if not sends_float8(mesh):
        gathered, rowwise = _cast_when_sent()
    if kind == "rowwise":
        return cast(ParallelStyle, rowwise(output_layouts=output))
    if kind == "gathered":
        return cast(ParallelStyle, gathered(input_layouts=Shard(1)))
    return cast(ParallelStyle, parallel.Float8ColwiseParallel())


@functools.cache
def _cast_when_sent() -> tuple[Any, Any]:
    """Return torchao's styles with the order of cast and gather reversed."""
    parallel = torchao().float8_tensor_parallel
    colwise: Any = parallel.Float8ColwiseParallel
    rowwise: Any = parallel.Float8RowwiseParallel

    class Gathered(colwise):
        _prepare_input_fn = staticmethod(ColwiseParallel._prepare_input_fn)

    class Rowwise(rowwise):
        # It prepares the gradient, in the backward.
        _prepare_output_fn = staticmethod(RowwiseParallel._prepare_output_fn)

    return Gathered, Rowwise


# One function for all blocks: `titanlite.parallel.tensor` makes one class for each.
@functools.cache
def input_cast() -> Callable[[Tensor, Any], Tensor]:
    """Return a function (x, linear) → x in float8, as linears of that recipe would cast it.

    A cast before the all-gather halves its bytes, and happens once for linears with one input.
    """
    # Outside of compiled code, which cannot import.
    float8 = torchao()
    to_float8 = float8.float8_scaling_utils.hp_tensor_to_float8_dynamic
    role = float8.GemmInputRole.INPUT

    def to_input(x: Tensor, linear: Any) -> Tensor:
        dtype = linear.config.cast_config_input.target_dtype
        return cast(Tensor, to_float8(x, dtype, linear.linear_mm_config, gemm_input_role=role))

    return to_input
