"""What the linears of a step cost, for `titanlite.plan.speed`.

A feature whose products are others overrides it.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

from titanlite.models.linears import LinearKind

if TYPE_CHECKING:
    from titanlite.plan.step_sizes import StepSizes


class Casts(NamedTuple):
    """Seconds of casts, or of products, of all blocks in one micro-batch."""

    forward: float = 0.0
    backward: float = 0.0


class ProductSpeed:
    """The linears of a step, in the dtype of its activations."""

    #: Products run at another peak than that of bf16, though the MFU is of that.
    is_below_bf16 = False
    #: Sentences for the plan.
    assumptions: Sequence[str] = ()
    #: Eager products save inputs when they are done, so that recomputation runs to the end of a
    #: block.
    saves_inputs_late = False
    #: Products of the backward over those of the forward: gradients of inputs and of weights.
    backward = 2.0

    def __init__(self, step: StepSizes) -> None:
        self.step = step

    @cached_property
    def kinds(self) -> Sequence[LinearKind]:
        """All linears of the model, by kind."""
        return self.step.model_linears.kinds()

    def peak(self, linear: LinearKind) -> float | None:
        """Return the peak FLOPS of a product; None: that of activations."""
        return None

    @cached_property
    def casts(self) -> Casts:
        """Seconds of the casts that products need."""
        return Casts()

    @cached_property
    def beside(self) -> Casts:
        """Seconds of products beside the linears of blocks."""
        return Casts()

    @cached_property
    def gathers_less(self) -> float:
        """Bytes that gathers of weights save."""
        return 0.0

    @property
    def tensor_gathers_less(self) -> int:
        """Collectives of a block that tensor parallelism saves."""
        return 0
