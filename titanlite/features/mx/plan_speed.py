"""The time of products in MXFP8, for `titanlite.plan.speed`: that of bf16, for want of runs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from titanlite.config.errors import unfit
from titanlite.config.sections import Float8
from titanlite.features.mx.checks import RECIPE
from titanlite.plan.product_speed import ProductSpeed

if TYPE_CHECKING:
    from titanlite.plan.step_sizes import StepSizes

#: How the keys of GPUs with MX units begin (`titanlite.plan.hardware.GPUS`).
_GPUS = ("b200",)


class MXSpeed(ProductSpeed):
    """The linears of a step, of which some compute in MXFP8.

    Raises ConfigError for a GPU that has no MX units, unless it emulates them.
    """

    is_below_bf16 = True
    assumptions = ("products in MXFP8 count as in bf16: their speed was never measured",)

    def __init__(self, section: Float8, step: StepSizes) -> None:
        super().__init__(step)
        gpu = step.rates.gpu
        if not section.emulate and not gpu.key.startswith(_GPUS):
            message = f"{gpu.key} has no MXFP8"
            hint = "take another recipe, or name another GPU"
            raise unfit(RECIPE, message, hint)
