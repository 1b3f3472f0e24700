"""The base of linears that a feature has put in the place of plain ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor.parallel import ParallelStyle
    from torch.distributed.tensor.placement_types import Placement


class FeatureLinear:
    """A linear with its own ways: what the rest of titanlite asks it instead of its kind."""

    #: Names of its parameters that are trained beside a frozen weight, and alone are saved.
    adapters: tuple[str, ...] = ()
    #: Width of the products of these.
    adapter_rank = 0

    def tensor_style(self, kind: str, output: Placement, mesh: DeviceMesh) -> ParallelStyle | None:
        """Return how tensor parallelism divides it; None: as any other linear.

        kind: as in a plan of `apply_tp`. output: the placement of the result, where the kind leaves
        it open.
        """
        return None

    def input_cast(self, mesh: DeviceMesh) -> Callable[[Tensor, nn.Module], Tensor] | None:
        """Return a function (x, linear) → x that shrinks an input before `mesh` gathers it, or
        None.

        Linears with the same input must have the same one.
        """
        return None

    def weights_replaced(self) -> None:
        """Forget all that was computed from the weights: others were put in their place."""


def weights_replaced(model: nn.Module) -> None:
    """Tell the linears of a model that other weights were put in place, by no update of a step."""
    for module in model.modules():
        if isinstance(module, FeatureLinear):
            module.weights_replaced()


def adapter_rank(model: nn.Module) -> int:
    """Return the width of the adapters in a model; 0: there are none."""
    ranks = [module.adapter_rank for module in model.modules() if isinstance(module, FeatureLinear)]
    return max(ranks, default=0)
