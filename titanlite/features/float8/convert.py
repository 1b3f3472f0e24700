"""Linears that compute in float8, by torchao: between the pipeline's cut and `fully_shard`.

# on the meta device, before tensor parallelism and everything else
apply_float8(model, names, "tensorwise")
apply_tp(model, plan, mesh)                 # asks converted linears how to divide them
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ParallelStyle
from torch.distributed.tensor.placement_types import Placement

from titanlite.features.float8 import gathered, tensor_parallel
from titanlite.features.float8.package import float8_linears, torchao
from titanlite.parallel.feature_linear import FeatureLinear

#: Inductor's options by the first word of a recipe. It leaves out RMSNorm's casts to bf16 in the
#: forward and has them in the backward. With a scale per row losses become NaN (pytorch issue
#: 150859).
COMPILE_OPTIONS = {"rowwise": {"emulate_precision_casts": True}}


def apply_float8(
    model: nn.Module,
    names: Sequence[str],
    recipe: str,
    *,
    all_gather: bool = False,
    emulate: bool = False,
) -> list[str]:
    """Let the linears of these names compute in float8, in place; return those that it has.

    model: on the meta device. Names of other pipeline stages are skipped.
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

    class Linear(base, FeatureLinear):
        def tensor_style(
            self, kind: str, output: Placement, mesh: DeviceMesh
        ) -> ParallelStyle | None:
            if kind not in tensor_parallel.KINDS:
                return None
            return tensor_parallel.float8_style(kind, output, mesh)

        def input_cast(self, mesh: DeviceMesh) -> Callable[[Tensor, nn.Module], Tensor] | None:
            return tensor_parallel.input_cast() if tensor_parallel.sends_float8(mesh) else None

        def weights_replaced(self) -> None:
            gathered.forget_scale(self.weight)

    Linear.__name__ = Linear.__qualname__ = "Float8Linear"
    return Linear
