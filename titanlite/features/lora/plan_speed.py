"""The time of frozen products with adapters, for `titanlite.plan.speed`. No torch here.

titanlite/plan/FORMULAS.md derives the numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

from titanlite.features.lora.settings import Adapters
from titanlite.models.linears import LinearKind
from titanlite.plan.product_speed import Casts, ProductSpeed

#: Times that a sum of two tensors moves one of them.
_SUM = 3


class LoraSpeed(ProductSpeed):
    """The linears of a step, whose weights are not trained, with adapters beside some of them."""

    def __init__(self, frozen: ProductSpeed, adapters: Adapters) -> None:
        super().__init__(frozen.step)
        self.frozen = frozen
        self.adapters = adapters
        self.is_below_bf16 = frozen.is_below_bf16
        self.assumptions = frozen.assumptions
        self.saves_inputs_late = frozen.saves_inputs_late
        if type(frozen) is ProductSpeed:
            # No gradients of weights. torchao makes them in any case.
            self.backward = 1.0

    @cached_property
    def kinds(self) -> Sequence[LinearKind]:
        return self.frozen.kinds

    def peak(self, linear: LinearKind) -> float | None:
        return self.frozen.peak(linear)

    @cached_property
    def casts(self) -> Casts:
        return self.frozen.casts

    @cached_property
    def gathers_less(self) -> float:
        return self.frozen.gathers_less

    @property
    def tensor_gathers_less(self) -> int:
        return self.frozen.tensor_gathers_less

    @cached_property
    def beside(self) -> Casts:
        """Two narrow products and a sum for each adapter; their backward has twice the products,
        and a sum of gradients.
        """
        step = self.step
        rank = self.adapters.rank
        products = 0.0
        outputs = 0
        inputs = 0
        for linear in self.kinds:
            count = sum(name in self.adapters.sizes for name in linear.names)
            size = linear.size
            down = step.rates.product(step.tokens, size.in_features, rank, None)
            up = step.rates.product(step.tokens, rank, size.out_features, None)
            products += count * (down + up)
            outputs += count * size.out_features
            inputs += count * size.in_features
        moved = _SUM * step.itemsize * step.tokens
        return Casts(
            products + step.rates.moved(moved * outputs),
            2 * products + step.rates.moved(moved * inputs),
        )
