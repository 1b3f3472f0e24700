"""The time of products in MXFP8, for `titanlite.plan.speed`: that of bf16, for want of runs."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from titanlite.config.errors import unfit
from titanlite.config.sections import Float8
from titanlite.features.mx.checks import RECIPE
from titanlite.plan.product_speed import ProductSpeed

if TYPE_CHECKING:
    from titanlite.plan.step_sizes import StepSizes

#: How the keys of GPUs with MX units begin (`titanlite.plan.hardware.GPUS`).
_GPUS = ("b200",)


def mx_speed(section: Float8, step: StepSizes, products: ProductSpeed) -> ProductSpeed:
    """Return products of which some compute in MXFP8.

    Raises ConfigError for a GPU that has no MX units, unless it emulates them.
    """
    gpu = step.rates.gpu
    if not section.emulate and not gpu.key.startswith(_GPUS):
        hint = "take another recipe, or name another GPU"
        raise unfit(RECIPE, f"{gpu.key} has no MXFP8", hint)
    note = "products in MXFP8 count as in bf16: their speed was never measured"
    return replace(products, is_below_bf16=True, assumptions=(note,))
