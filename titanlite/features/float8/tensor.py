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
    """Whether ranks can send each other float8 tensors.

    gloo cannot: there tensors are cast after they were sent.

    The numbers are the same: the scale of a tensor is that of all its parts, before and after.
    """
    return not (mesh.device_type == "cpu" and dist.get_backend(mesh.get_group()) == "gloo")


def float8_style(kind: str, output: Placement, mesh: DeviceMesh) -> ParallelStyle:
    """Return torchao's style that divides a converted linear over the ranks of `mesh`.

    kind: one of `KINDS`. output: placement of a rowwise linear's output.
    """
    styles = _styles(sends_float8(mesh))
    if kind == "rowwise":
        made = styles["rowwise"](output_layouts=output)
    elif kind == "gathered":
        made = styles["gathered"](input_layouts=Shard(1))
    else:
        made = styles["colwise"]()
    return cast(ParallelStyle, made)


def _prepare_input(float8: Any, plain: Any) -> Any:
    """Return how a style of torchao's prepares the input of a linear. An exact linear takes it as
    `plain`, the style of torch, does.
    """

    def prepare(input_layouts: Any, desired: Any, module: Any, inputs: Any, mesh: Any) -> Any:
        style = float8 if module.exact is None else plain
        return style._prepare_input_fn(input_layouts, desired, module, inputs, mesh)

    return staticmethod(prepare)


@functools.cache
def _styles(sends: bool) -> dict[str, Any]:
    parallel = torchao().float8_tensor_parallel
    colwise: Any = parallel.Float8ColwiseParallel
    rowwise: Any = parallel.Float8RowwiseParallel

    class Colwise(colwise):
        _prepare_input_fn = _prepare_input(colwise, ColwiseParallel)

    class Gathered(colwise):
        # torchao casts the input and then gathers it.
        _prepare_input_fn = _prepare_input(colwise if sends else ColwiseParallel, ColwiseParallel)

    class Rowwise(rowwise):
        _prepare_input_fn = _prepare_input(rowwise, RowwiseParallel)

        @staticmethod
        def _prepare_output_fn(
            output_layouts: Any, use_local: Any, module: Any, outputs: Any, mesh: Any
        ) -> Any:
            # In the backward torchao casts the gradient and then gathers it.
            style: Any = rowwise if sends else RowwiseParallel
            return style._prepare_output_fn(output_layouts, use_local, module, outputs, mesh)

    return {"colwise": Colwise, "gathered": Gathered, "rowwise": Rowwise}


# One function for all blocks: `titanlite.parallel.tensor` makes one class for each.
@functools.cache
def input_cast() -> Callable[[Tensor, Any], Tensor]:
    """Return a function (x, linear) → x in float8, as `linear` and others of its recipe would cast
    it.

    A cast before the all-gather halves its bytes, and happens once for all linears with the same
    input.
    """
    # Outside of compiled code, which cannot import.
    float8 = torchao()
    to_float8 = float8.float8_scaling_utils.hp_tensor_to_float8_dynamic
    role = float8.GemmInputRole.INPUT

    def to_input(x: Tensor, linear: Any) -> Tensor:
        if linear.exact is not None:
            return x
        dtype = linear.config.cast_config_input.target_dtype
        return cast(Tensor, to_float8(x, dtype, linear.linear_mm_config, gemm_input_role=role))

    return to_input
