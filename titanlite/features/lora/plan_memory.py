"""The memory of frozen products with adapters, for `titanlite.plan.memory`. No torch here.

titanlite/plan/FORMULAS.md derives the numbers.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

from titanlite.plan.lifetimes import Op
from titanlite.plan.product_memory import Product, ProductMemory

if TYPE_CHECKING:
    from titanlite.features.lora.settings import Adapters


@dataclass(frozen=True)
class LoraMemory(ProductMemory):
    """Products with weights that are not trained, some of them with an adapter beside."""

    trains: ClassVar[bool] = False

    #: The products themselves.
    frozen: ProductMemory = ProductMemory()
    #: Those with an adapter, by name in the block.
    names: frozenset[str] = frozenset()
    rank: int = 0
    drops: bool = False

    def op(self, product: Product) -> Op:
        plain = replace(self.frozen.op(product), weight=0)
        if type(self.frozen) is ProductMemory:
            # Only the gradient of the weight would need the input.
            plain = replace(plain, saves=())
        if product.key not in self.names:
            return plain
        inputs = product.tokens * product.columns * product.size
        outputs = product.tokens * product.rows * product.size
        keeps = plain.keeps + product.tokens * self.rank * product.size
        saves: tuple[str, ...] = (product.x,)
        if self.drops:
            # What is left of the input, and a byte for each number of it.
            keeps += inputs + product.tokens * product.columns
            saves = plain.saves
        return replace(
            plain,
            saves=saves,
            keeps=keeps,
            # Both summands beside the sum; in the backward the gradients of both beside theirs.
            forward=max(plain.forward, 2 * outputs),
            backward=max(plain.backward, inputs),
            weight=self.rank * (product.rows + product.columns) * product.size,
        )

    def gathered_bytes(self, key: str) -> int:
        return self.frozen.gathered_bytes(key)


def lora_memory(adapters: Adapters, products: ProductMemory, dropout: float) -> LoraMemory:
    """Return the products of a run. A kind of linear that has adapters in some blocks counts as one
    that has them in all.
    """
    return LoraMemory(products, frozenset(adapters.kinds), adapters.rank, dropout > 0)
