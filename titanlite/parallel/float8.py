"""Linears in float8, by torchao: between the pipeline's cut and `fully_shard`.

    # on the meta device, before tensor parallelism and everything else
    apply_float8(model, names, "tensorwise")
    apply_tp(model, plan, mesh)                 # recognises converted linears
    after_update = ScalePrecompute(model, mesh) # for `train_step`, with all_gather

torchao is imported when the first of these is called, and not before: it takes seconds.
"""

from __future__ import annotations

import functools
import logging
import re
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from importlib import metadata
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

from titanlite.parallel import ParallelismError
from titanlite.parallel.fsdp import free_gathered
from titanlite.parallel.local import parts_of
from titanlite.parallel.meshes import fsdp_mesh

#: The first with float8 products: Ada and Hopper.
_CAPABILITY = (8, 9)
#: By the first word of a recipe: inductor's options. It leaves out RMSNorm's casts to bf16 in the
#: forward and has them in the backward: with a scale per row losses become NaN (pytorch issue
#: 150859).
COMPILE_OPTIONS = {"rowwise": {"emulate_precision_casts": True}}


def check_float8() -> None:
    """Raise ParallelismError unless this machine has float8 products and packages that store them
    right.

    It needs no process group.
    """
    if not torch.cuda.is_available():
        raise ParallelismError("a CPU has no float8 products")
    capability = torch.cuda.get_device_capability()
    if torch.version.hip is None and capability < _CAPABILITY:
        version, name = ".".join(map(str, capability)), torch.cuda.get_device_name()
        raise ParallelismError(
            f"{name} has compute capability {version}, and float8 products need 8.9"
        )
    torch_, torchao_ = (metadata.version(name) for name in ("torch", "torchao"))
    if _release(torch_) >= (2, 14) and _release(torchao_) < (0, 18):
        # triton issue 11111: inductor of torch 2.14 meets it, and torchao 0.18 avoids it.
        raise ParallelismError(
            f"torch {torch_} stores compiled float8 values wrong, and torchao {torchao_} does not "
            "prevent it: pip install 'torchao>=0.18'"
        )


def _release(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", version)[:2])


@functools.cache
def torchao() -> Any:
    """Import `torchao.float8` without its log lines and warnings, which are mostly about kernels
    for other devices.
    """
    for name in ("torchao", "torch.utils._pytree"):
        logging.getLogger(name).setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import torchao.float8
        import torchao.float8.float8_linear
        import torchao.float8.float8_tensor_parallel
    return torchao.float8


def apply_float8(
    model: nn.Module,
    names: Sequence[str],
    recipe: str,
    *,
    all_gather: bool = False,
    emulate: bool = False,
) -> list[str]:
    """Let the linears of these names compute in float8, in place.

    Return the names that this model has.

    model: on the meta device. Names of other pipeline stages are skipped. Names and shapes of
    parameters stay as they are, and so do the weights, which are in high precision.
    recipe: "tensorwise", "rowwise" or "rowwise_with_gw_hp" (weights' gradients in high precision).
    all_gather: FSDP gathers weights in float8. emulate: the same rounded numbers, multiplied in
    float32.
    """
    float8 = torchao()
    config = replace(
        float8.Float8LinearConfig.from_recipe_name(recipe),
        emulate=emulate,
        enable_fsdp_float8_all_gather=all_gather,
    )
    modules = dict(model.named_modules())
    wanted = {name for name in names if name in modules}
    float8.convert_to_float8_training(
        model, config=config, module_filter_fn=lambda _, name: name in wanted
    )
    for linear in float8_linears(model):
        linear.__class__ = _linear_class()
    return [name for name in names if name in wanted]


@functools.cache
def _linear_class() -> type[nn.Module]:
    base: Any = torchao().float8_linear.Float8Linear

    class Linear(base):
        #: Returns the weight for a product in high precision; None: the product is in float8.
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
    """Return the linears of a model that compute in float8."""
    return [module for module in model.modules() if is_float8(module)]


def _wrapper(tensor: Tensor) -> Any:
    """Return torchao's wrapper of a weight that is gathered in float8, or None."""
    local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
    module = sys.modules.get("torchao.float8.fsdp_utils")
    return (
        local
        if module is not None and isinstance(local, module.WeightWithDynamicFloat8CastTensor)
        else None
    )


def plain(tensor: Tensor) -> Tensor:
    """Return a weight without torchao's wrapper around it, on the same memory; any other tensor as
    it is.
    """
    wrapper = _wrapper(tensor)
    if wrapper is None:
        return tensor
    inner = wrapper._tensor.detach()
    # Keep the placements: `from_local` does not take those of tensor parallelism under FSDP.
    return (
        DTensor(inner, tensor._spec, requires_grad=False) if isinstance(tensor, DTensor) else inner
    )


class ScalePrecompute:
    """Computes the scales of all weights that are gathered in float8, with one all-reduce.

    Call it after each update.

    Without it each weight has an all-reduce of its own, whenever it is gathered. The scales are the
    same.
    """

    def __init__(self, model: nn.Module, mesh: DeviceMesh) -> None:
        """mesh: from `DistEnv.build_mesh`."""
        shards = fsdp_mesh(mesh)
        self._group = shards.get_group(shards.ndim - 1)
        self._linears = float8_linears(model)

    @torch.no_grad()
    def __call__(self) -> None:
        wrappers = [
            w for w in (_wrapper(linear.weight) for linear in self._linears) if w is not None
        ]
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
    """Forget the scales of `ScalePrecompute`; call it after weights were replaced."""
    for linear in float8_linears(model):
        if (wrapper := _wrapper(linear.weight)) is not None:
            wrapper._precomputed_scale = None


@contextmanager
def high_precision(model: nn.Module, dtype: torch.dtype) -> Iterator[None]:
    """Let converted linears compute in `dtype` inside, where compiled code and backward passes do
    not run.

    All ranks enter it together, with no module of `fully_shard` between its forward and its
    backward. A weight that is gathered in float8 is gathered once more in `dtype`.
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
    """Run compiled modules eagerly inside."""
    return torch.compiler.set_stance("force_eager")


def _exact(linear: nn.Linear, sharded: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the weight in high precision. sharded: the parameter while it is not gathered."""
    if _wrapper(sharded) is None:
        return linear.weight
    weight = plain(sharded)
    assert isinstance(weight, DTensor)
    mesh, names = weight.device_mesh, weight.device_mesh.mesh_dim_names or ()
    placements = dict(zip(names, weight.placements, strict=True))
    # FSDP's ranks hold equal numbers of rows (`titanlite.start.fit` refuses others); tensor
    # parallelism's part stays divided.
    over = [name for name in names if name != "tp"][-1]
    parts = DTensor.from_local(weight.to_local().to(dtype), mesh[over], [Shard(0)])
    whole = parts.full_tensor()
    return (
        DTensor.from_local(whole, mesh["tp"], [placements["tp"]]) if "tp" in placements else whole
    )


def _free(model: nn.Module) -> None:
    """Free gathered weights of a model or a pipeline."""
    for part in parts_of(model):
        free_gathered(part)


def sends_float8(mesh: DeviceMesh) -> bool:
    """Whether ranks can send each other float8 tensors.

    gloo cannot: there tensors are cast after they were sent.

    The numbers are the same: the scale of a tensor is that of all its parts, before and after.
    """
    return not (mesh.device_type == "cpu" and dist.get_backend(mesh.get_group()) == "gloo")


def gather_as_bytes(model: nn.Module) -> None:
    """Let FSDP gather float8 weights as bytes, which every backend can send. gloo knows no float8.

    Only groups whose weights are all in float8 need it: FSDP itself sends the others as bytes.
    Call it after `apply_fsdp`.
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


def float8_style(kind: str, output: Placement, mesh: DeviceMesh) -> ParallelStyle:
    """Return torchao's style that divides a converted linear over the ranks of `mesh`.

    kind: "colwise" or "rowwise". output: placement of a rowwise linear's output.
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
        def _prepare_input_fn(
            input_layouts: Any, desired: Any, module: Any, inputs: Any, mesh: Any
        ) -> Any:
            style: Any = colwise if module.exact is None else ColwiseParallel
            return style._prepare_input_fn(input_layouts, desired, module, inputs, mesh)

    class Rowwise(rowwise):
        @staticmethod
        def _prepare_input_fn(
            input_layouts: Any, desired: Any, module: Any, inputs: Any, mesh: Any
        ) -> Any:
            style: Any = rowwise if module.exact is None else RowwiseParallel
            return style._prepare_input_fn(input_layouts, desired, module, inputs, mesh)

        @staticmethod
        def _prepare_output_fn(
            output_layouts: Any, use_local: Any, module: Any, outputs: Any, mesh: Any
        ) -> Any:
            # In the backward torchao casts the gradient and then gathers it.
            style: Any = rowwise if sends else RowwiseParallel
            return style._prepare_output_fn(output_layouts, use_local, module, outputs, mesh)

    return {"colwise": Colwise, "rowwise": Rowwise}


def input_cast() -> Callable[[Tensor, Any], Tensor]:
    """Return a function (x, linear) → x in float8, as `linear` and others of its recipe would cast
    it.

    A cast before the all-gather halves its bytes, and happens once for all linears with the same
    input.
    """
    # Outside of compiled code, which cannot import.
    float8 = torchao()
    to_float8, role = (
        float8.float8_scaling_utils.hp_tensor_to_float8_dynamic,
        float8.GemmInputRole.INPUT,
    )

    def to_input(x: Tensor, linear: Any) -> Tensor:
        if linear.exact is not None:
            return x
        dtype = linear.config.cast_config_input.target_dtype
        return cast(Tensor, to_float8(x, dtype, linear.linear_mm_config, gemm_input_role=role))

    return to_input
