"""The memory of frozen products with adapters, for `titanlite.plan.memory`. No torch here.

titanlite/plan/FORMULAS.md derives the numbers.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import ClassVar

from titanlite.features.lora.settings import Adapters
from titanlite.plan.lifetimes import Op
from titanlite.plan.product_memory import Product, ProductMemory
from titanlite.plan.weights import Weight


@dataclass(frozen=True)
class LoraMemory(ProductMemory):
    """Products with weights that are not trained, some of them with an adapter beside.

    A kind of linear with adapters in some blocks counts as in all.
    """

    trains: ClassVar[bool] = False

    adapters: Adapters = field(hash=False)
    drops: bool

    @cached_property
    def kinds(self) -> frozenset[str]:
        return frozenset(self.adapters.kinds)

    def op(self, product: Product) -> Op:
        # Only the gradient of the weight would need the input.
        plain = replace(super().op(product), weight=0, saves=())
        if product.key not in self.kinds:
            return plain
        inputs = product.tokens * product.columns * product.size
        outputs = product.tokens * product.rows * product.size
        keeps = plain.keeps + product.tokens * self.adapters.rank * product.size
        saves: tuple[str, ...] = (product.x,)
        if self.drops:
            # The rest of the input, and a byte for each number of it.
            keeps += inputs + product.tokens * product.columns
            saves = ()
        return replace(
            plain,
            saves=saves,
            keeps=keeps,
            # Both summands beside the sum; in the backward the gradients of both beside theirs.
            forward=max(plain.forward, 2 * outputs),
            backward=max(plain.backward, inputs),
            weight=self.adapters.rank * (product.rows + product.columns) * product.size,
        )

    def weights(self, module: str, own: list[Weight], shards: int) -> list[Weight]:
        rank = self.adapters.rank
        found = [replace(weight, frozen=True) for weight in own]
        for name, size in self.adapters.sizes.items():
            if name.startswith(f"{module}."):
                for rows, columns in ((rank, size.in_features), (size.out_features, rank)):
                    found.append(Weight(rows, columns, shards, (rows, columns)))
        return found
