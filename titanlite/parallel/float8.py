"""Products of linears in float8, by torchao: what it does to a model between the pipeline's cut and `fully_shard`.

    convert(model, names, plan)                 # on the meta device, before tensor parallelism and all else
    split(model, spec.tensor_plan(args), mesh)  # `titanlite.parallel.tensor` knows converted linears
    after_update = ScalePrecompute(model, mesh) # for `train_step`, where the plan says so

torchao is imported when the first of these is called, and not before: it takes seconds.
"""

from __future__ import annotations

import functools
import logging
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel
from torch.distributed.tensor.placement_types import Placement

from titanlite.config.errors import ConfigError, Problem
from titanlite.config.plans import Float8Plan
from titanlite.parallel.fsdp import fsdp_mesh
from titanlite.parallel.pipeline import PipelineModel

#: The first with float8 products: Ada and Hopper.
_CAPABILITY = (8, 9)


def check_float8(plan: Float8Plan) -> None:
    """Raise ConfigError unless this machine can do what the plan asks for; no process group is needed."""
    if not plan.enable or plan.emulate:
        return
    if not torch.cuda.is_available():
        lacking = "a CPU has no float8 products"
    elif torch.version.hip is None and torch.cuda.get_device_capability() < _CAPABILITY:
        major, minor = torch.cuda.get_device_capability()
        lacking = f"{torch.cuda.get_device_name()} has compute capability {major}.{minor}, and float8 products need 8.9"
    else:
        return
    hint = "float8.emulate = true computes with the same rounded numbers in float32, which is slow and for tests"
    raise ConfigError([Problem("", "float8.enable_float8_linear", lacking, f"set it to false; {hint}")])


@functools.cache
def torchao() -> Any:
    """`torchao.float8`, without what it has to say when it is imported: of kernels for other devices, mostly."""
    loggers = [logging.getLogger(name) for name in ("torchao", "torch.utils._pytree")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            import torchao.float8
            import torchao.float8.float8_linear
            import torchao.float8.float8_tensor_parallel
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
    return torchao.float8


def convert(model: nn.Module, names: Sequence[str], plan: Float8Plan) -> list[str]:
    """Let the linears of these names compute in float8, in place; returns those that this model has.

    model: on the meta device. Those that it lacks (another pipeline stage's) are passed over. Names and shapes of
    parameters stay as they are, and so do the weights, which are in high precision.
    """
    float8 = torchao()
    config = replace(
        float8.Float8LinearConfig.from_recipe_name(plan.recipe),
        emulate=plan.emulate,
        enable_fsdp_float8_all_gather=plan.all_gather,
    )
    wanted = {name for name in names if name in dict(model.named_modules())}
    float8.convert_to_float8_training(model, config=config, module_filter_fn=lambda _, name: name in wanted)
    for linear in float8_linears(model):
        linear.__class__ = _linear_class()
    return [name for name in names if name in wanted]


@functools.cache
def _linear_class() -> type[nn.Module]:
    base: Any = torchao().float8_linear.Float8Linear

    class Linear(base):
        #: Gives the weight for a product in high precision; None: the product is in float8.
        exact: Callable[[], Tensor] | None = None

        def forward(self, input: Tensor) -> Tensor:
            if self.exact is not None:
                return F.linear(input, self.exact(), self.bias)
            return cast(Tensor, super().forward(input))

    Linear.__name__ = Linear.__qualname__ = "Float8Linear"
    return Linear


def is_float8(module: nn.Module) -> bool:
    """Whether a linear computes in float8."""
    name = "torchao.float8.float8_linear"
    return name in sys.modules and isinstance(module, sys.modules[name].Float8Linear)


def float8_linears(model: nn.Module) -> list[Any]:
    """The linears of a model that compute in float8."""
    return [module for module in model.modules() if is_float8(module)]


# Weights that are gathered in float8


def _wrapper(tensor: Tensor) -> Any:
    """torchao's wrapper of a weight that is gathered in float8, or None."""
    local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
    module = sys.modules.get("torchao.float8.fsdp_utils")
    return local if module is not None and isinstance(local, module.WeightWithDynamicFloat8CastTensor) else None


def plain(tensor: Tensor) -> Tensor:
    """A weight without torchao's wrapper around it, on the same memory; any other tensor as it is."""
    wrapper = _wrapper(tensor)
    if wrapper is None:
        return tensor
    inner = wrapper._tensor.detach()
    # With the placements as they are: those of tensor parallelism under FSDP cannot be given to `from_local`.
    return DTensor(inner, tensor._spec, requires_grad=False) if isinstance(tensor, DTensor) else inner


class ScalePrecompute:
    """Computes the scales of all weights that are gathered in float8, with one all-reduce. Call it after each update.

    Without it each weight's largest value travels by itself, whenever the weight is gathered. The scales are the same.
    """

    def __init__(self, model: nn.Module, mesh: DeviceMesh) -> None:
        """mesh: of `World.build_mesh`."""
        shards = fsdp_mesh(mesh)
        self._group = shards.get_group(shards.ndim - 1)
        self._linears = float8_linears(model)

    @torch.no_grad()
    def __call__(self) -> None:
        wrappers = [w for w in (_wrapper(linear.weight) for linear in self._linears) if w is not None]
        if not wrappers:
            return
        float8 = torchao()
        # The largest absolute value, without a copy of the weights.
        largest = torch.stack(torch._foreach_norm([w._tensor for w in wrappers], float("inf")))
        dist.all_reduce(largest, dist.ReduceOp.MAX, self._group)
        dtype = self._linears[0].config.cast_config_weight.target_dtype
        scales = float8.float8_utils.amax_to_scale(largest, dtype)
        for wrapper, scale in zip(wrappers, scales.unbind(), strict=True):
            wrapper._precomputed_scale = scale


def forget_scales(model: nn.Module) -> None:
    """After weights were replaced: what `ScalePrecompute` found does not hold any more."""
    for linear in float8_linears(model):
        if (wrapper := _wrapper(linear.weight)) is not None:
            wrapper._precomputed_scale = None


# Products in high precision, for comparison


@contextmanager
def high_precision(model: nn.Module, dtype: torch.dtype) -> Iterator[None]:
    """Converted linears compute in `dtype` inside; nothing is compiled there, and there is no backward.

    All ranks enter it together, with no unit of `fully_shard` between its forward and its backward. A weight that is
    gathered in float8 is gathered once more, as it is.
    """
    linears = float8_linears(model)
    _free(model)
    for linear in linears:
        linear.exact = functools.partial(_exact, linear, linear.weight, dtype)
    try:
        with uncompiled():
            yield
    finally:
        for linear in linears:
            del linear.exact
        _free(model)


def uncompiled() -> Any:
    """Compiled modules run as they were written inside."""
    return torch.compiler.set_stance("force_eager")


def _exact(linear: nn.Linear, sharded: Tensor, dtype: torch.dtype) -> Tensor:
    """The weight in high precision. sharded: as it is while no unit holds it gathered."""
    if _wrapper(sharded) is None:
        return linear.weight
    weight = plain(sharded)
    assert isinstance(weight, DTensor)
    mesh, names = weight.device_mesh, weight.device_mesh.mesh_dim_names or ()
    placements = dict(zip(names, weight.placements, strict=True))
    # Rows over the ranks of FSDP, equal numbers of them (see `gather_problem`); tensor parallelism's part stays one.
    over = [name for name in names if name != "tp"][-1]
    parts = DTensor.from_local(weight.to_local().to(dtype), mesh[over], [Shard(0)])
    whole = parts.full_tensor()
    return DTensor.from_local(whole, mesh["tp"], [placements["tp"]]) if "tp" in placements else whole


def _free(model: nn.Module) -> None:
    """Free gathered weights, so that parameters are the sharded ones."""
    stages = model.stages.values() if isinstance(model, PipelineModel) else [model]
    for module in (m for stage in stages for m in stage.modules()):
        if isinstance(module, FSDPModule):
            module.reshard()


# Tensor parallelism


def sends_float8(mesh: DeviceMesh) -> bool:
    """Whether ranks can send each other float8 tensors. gloo cannot: they travel as they were before the cast.

    The numbers are the same: the scale of a tensor is that of all its parts, whether it is cast before or after.
    """
    return not (mesh.device_type == "cpu" and dist.get_backend(mesh.get_group()) == "gloo")


def float8_style(kind: str, output: Placement, mesh: DeviceMesh) -> ParallelStyle:
    """How a converted linear is divided over the ranks of `mesh`: torchao's styles.

    kind: "colwise" or "rowwise". output: of a rowwise one.
    """
    style = _styles(sends_float8(mesh))[kind]
    made = style() if kind == "colwise" else style(output_layouts=output)
    return cast(ParallelStyle, made)


@functools.cache
def _styles(sends: bool) -> dict[str, Any]:
    parallel = torchao().float8_tensor_parallel
    colwise: Any = parallel.Float8ColwiseParallel
    rowwise: Any = parallel.Float8RowwiseParallel

    class Colwise(colwise):
        @staticmethod
        def _prepare_input_fn(input_layouts: Any, desired: Any, module: Any, inputs: Any, mesh: Any) -> Any:
            style: Any = colwise if module.exact is None else ColwiseParallel
            return style._prepare_input_fn(input_layouts, desired, module, inputs, mesh)

    class Rowwise(rowwise):
        @staticmethod
        def _prepare_input_fn(input_layouts: Any, desired: Any, module: Any, inputs: Any, mesh: Any) -> Any:
            style: Any = rowwise if module.exact is None else RowwiseParallel
            return style._prepare_input_fn(input_layouts, desired, module, inputs, mesh)

        @staticmethod
        def _prepare_output_fn(output_layouts: Any, use_local: Any, module: Any, outputs: Any, mesh: Any) -> Any:
            # In the backward torchao casts the gradient and then gathers it.
            style: Any = rowwise if sends else RowwiseParallel
            return style._prepare_output_fn(output_layouts, use_local, module, outputs, mesh)

    return {"colwise": Colwise, "rowwise": Rowwise}


def input_cast() -> Callable[[Tensor, Any], Tensor]:
    """(x, linear) → what `linear`, and others of its recipe that take the same input, would make of x by themselves.

    Cast before ranks gather it, it travels as half the bytes and is cast once for all of them.
    """
    # Outside of what is compiled: that cannot import.
    float8 = torchao()
    to_float8, role = float8.float8_scaling_utils.hp_tensor_to_float8_dynamic, float8.GemmInputRole.INPUT

    def to_input(x: Tensor, linear: Any) -> Tensor:
        if linear.exact is not None:
            return x
        dtype = linear.config.cast_config_input.target_dtype
        return cast(Tensor, to_float8(x, dtype, linear.linear_mm_config, gemm_input_role=role))

    return to_input
