"""The memory of products in MXFP8, for `titanlite.plan.memory`."""

from __future__ import annotations

from dataclasses import dataclass, replace

from titanlite.features.mx.checks import BLOCK
from titanlite.plan.lifetimes import Op
from titanlite.plan.product_memory import Product, ProductMemory

#: Bytes of a rounded number with its share of a scale.
_MX = 1 + 1 / BLOCK


@dataclass(frozen=True)
class MXMemory(ProductMemory):
    """Products of which those of some linears compute in MXFP8, with the kernels of GPUs."""

    #: Linears by name in the block.
    names: frozenset[str] = frozenset()

    def op(self, product: Product) -> Op:
        plain = super().op(product)
        if product.key not in self.names:
            return plain
        of_input = product.tokens * product.columns
        of_output = product.tokens * product.rows
        of_weight = product.rows * product.columns
        # Each factor of both products of the backward lives to its end.
        forward = round(_MX * (of_input + of_weight))
        backward = round(_MX * (2 * of_output + of_weight + of_input))
        return replace(plain, forward=forward, backward=backward)
