"""The time of frozen products with adapters, for `titanlite.plan.speed`. No torch here.

titanlite/plan/FORMULAS.md derives the numbers.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from titanlite.features.lora.settings import Adapters
from titanlite.plan.rates import Directions

if TYPE_CHECKING:
    from titanlite.plan.product_speed import ProductSpeed
    from titanlite.plan.step_sizes import StepSizes

#: Times that a sum of two tensors moves one of them.
_SUM = 3


def with_adapters(step: StepSizes, adapters: Adapters) -> ProductSpeed:
    """Return the products of a step, frozen, with two narrow ones and a sum beside each adapted
    linear; in backward twice the products and a sum.
    """
    frozen = step.products
    products = 0.0
    outputs = 0
    inputs = 0
    for linear in frozen.kinds:
        count = sum(name in adapters.sizes for name in linear.names)
        size = linear.size
        down = step.rates.product(step.tokens, size.in_features, adapters.rank)
        up = step.rates.product(step.tokens, adapters.rank, size.out_features)
        products += count * (down + up)
        outputs += count * size.out_features
        inputs += count * size.in_features
    moved = _SUM * step.itemsize * step.tokens
    beside = Directions(
        products + step.rates.moved(moved * outputs),
        2 * products + step.rates.moved(moved * inputs),
    )
    # No gradients of weights. torchao makes them in any case.
    backward = frozen.backward if frozen.is_below_bf16 else 1.0
    return replace(frozen, backward=backward, beside=beside)
