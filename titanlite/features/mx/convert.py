"""Linears that compute in MXFP8, by torchao: between the pipeline's cut and `fully_shard`.

# on the meta device, before tensor parallelism and everything else
apply_mx(model, names, "mxfp8")
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Shard

from titanlite.dist import ParallelismError
from titanlite.features.mx.checks import DIVIDED
from titanlite.features.mx.package import Product, product
from titanlite.parallel.feature_linear import FeatureLinear


def apply_mx(model: nn.Module, names: Sequence[str], recipe: str, *, emulate: bool) -> list[str]:
    """Let the linears of these names compute in MXFP8, in place; return those that it has.

    model: on the meta device. recipe: "mxfp8" or "mxfp8_floor". emulate: the same rounded numbers,
    multiplied in the activations' dtype. Raises ParallelismError for a module that is no plain
    linear.
    """
    modules = dict(model.named_modules())
    found = [name for name in names if name in modules]
    for name in found:
        linear = modules[name]
        if type(linear) is not nn.Linear:
            raise ParallelismError(f"{name} is no plain linear: it is a {type(linear).__name__}")
        # The parameters and their names stay.
        linear.__class__ = MXLinear
        linear.product = product(recipe, emulate)  # type: ignore[assignment]
    return found


class MXLinear(nn.Linear, FeatureLinear):
    """A linear whose three products are of MXFP8 numbers, rounded in blocks of 32 along the summed
    dimension.
    """

    product: Product

    def forward(self, input: Tensor) -> Tensor:
        if isinstance(self.weight, DTensor):
            output: Tensor = self._divided(input, self.weight)
        else:
            output = self.product(input, self.weight)
        return output if self.bias is None else output + self.bias

    def tensor_style(self, kind: str, output: Placement, mesh: DeviceMesh) -> None:
        """Take torch's style. Raises ParallelismError for one that leaves the weight whole."""
        if kind not in DIVIDED:
            known = ", ".join(DIVIDED)
            raise ParallelismError(f"a linear in MXFP8 is divided as {known}, and not as {kind}")

    def _divided(self, input: Tensor, weight: DTensor) -> DTensor:
        """Let each rank multiply its parts, which hold whole blocks: numbers are rounded as on one
        rank.
        """
        assert isinstance(input, DTensor)
        (way,) = weight.placements
        features = Shard(input.ndim - 1)
        # By columns, each rank has all inputs and adds a part of their gradient; by rows, it has
        # some inputs and adds a part of all outputs.
        gradient: Placement = Partial()
        result: Placement = features
        if way.is_shard(1):
            gradient = features
            result = Partial()
        output = self.product(
            input.to_local(grad_placements=[gradient]),
            weight.to_local(grad_placements=[way]),
        )
        return DTensor.from_local(output, weight.device_mesh, [result], run_check=False)
