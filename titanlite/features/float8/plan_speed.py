"""The time of products in float8, for `titanlite.plan.speed`.

titanlite/plan/FORMULAS.md derives the numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING

from titanlite.config.errors import unfit
from titanlite.config.sections import Float8
from titanlite.features.float8.choice import Float8Choice, choose_linears
from titanlite.models.linears import LinearKind
from titanlite.plan.product_speed import Casts, ProductSpeed

if TYPE_CHECKING:
    from titanlite.plan.step_sizes import StepSizes

#: Bytes that a cast moves per number, with its maximum; eager, a mean of 33 forward and 35
#: backward.
CAST_EAGER = 34
CAST_COMPILED = 5


class Float8Speed(ProductSpeed):
    """The linears of a step, of which those that are chosen compute in float8.

    Raises ConfigError for a GPU that has no float8.
    """

    is_below_bf16 = True
    assumptions = ("the MFU is of the peak in bf16, though products run in float8",)
    saves_inputs_late = True

    def __init__(self, section: Float8, step: StepSizes) -> None:
        super().__init__(step)
        self.section = section
        gpu = step.rates.gpu
        if gpu.float8 is None:
            message = f"{gpu.key} has no float8"
            hint = "set it to false, or name another GPU"
            raise unfit("float8.enable_float8_linear", message, hint)
        self._peak = step.rates.constants.float8 * gpu.float8

    @cached_property
    def choices(self) -> list[Float8Choice]:
        """All linears of the model, by kind and decision."""
        return choose_linears(self.step.model_linears, self.section)

    @cached_property
    def kinds(self) -> Sequence[LinearKind]:
        return self.choices

    @cached_property
    def _converted(self) -> set[str]:
        """The first name of each kind in float8."""
        return {choice.names[0] for choice in self.choices if choice.converted}

    def peak(self, linear: LinearKind) -> float | None:
        return self._peak if linear.names[0] in self._converted else None

    @cached_property
    def casts(self) -> Casts:
        """The backward casts the gradients of outputs, and copies inputs to the other order.

        Eager code casts all again for each of its two products.
        """
        step = self.step
        forward = 0.0
        backward = 0.0
        for linear in step.linears:
            if linear.names[0] not in self._converted:
                continue
            inputs = len(linear.names) * step.tokens * self._cast_inputs(linear)
            outputs = len(linear.names) * step.tokens * linear.size.out_features
            weights = 0 if self.section.enable_fsdp_float8_all_gather else linear.weights
            forward += inputs + weights
            if step.compiled:
                backward += outputs + inputs / 2
            else:
                backward += 2 * outputs + inputs + weights
        size = CAST_COMPILED if step.compiled else CAST_EAGER
        return Casts(step.rates.moved(size * forward), step.rates.moved(size * backward))

    def _cast_inputs(self, linear: LinearKind) -> float:
        """Return how many of a token's numbers are cast for the input of a linear.

        Compiled linears with the same input share the cast; under tensor parallelism each rank
        casts its tokens before it gathers them.
        """
        step = self.step
        firsts = [choice.names[0] for choice in self.choices]
        if step.tensor_plan.get(linear.names[0]) in ("gathered", "sequence", "heads"):
            return linear.size.in_features / step.mesh.tensor
        columns = [name for name in firsts if step.tensor_plan.get(name) == "colwise"]
        if linear.names[0] not in columns:
            return linear.size.in_features
        module = linear.names[0].rpartition(".")[0]
        takers = [name for name in columns if name.rpartition(".")[0] == module]
        sharing = len(takers) if step.compiled else 1
        return linear.size.in_features / step.mesh.tensor / sharing

    @cached_property
    def gathers_less(self) -> float:
        if not self.section.enable_fsdp_float8_all_gather:
            return 0.0
        converted = sum(choice.weights for choice in self.choices if choice.converted)
        return self.step.stage_share * converted

    @property
    def tensor_gathers_less(self) -> int:
        """Two gathers of the forward send half the bytes."""
        return 1 if self.section.recipe_name == "tensorwise" else 0
