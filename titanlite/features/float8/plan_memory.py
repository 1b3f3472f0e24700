"""The memory of products in float8, for `titanlite.plan.memory`.

titanlite/plan/FORMULAS.md derives the numbers.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from titanlite.features.float8.choice import Float8Choice, converted_names
from titanlite.models.linears import kind_of
from titanlite.plan.lifetimes import Op
from titanlite.plan.product_memory import Product, ProductMemory


@dataclass(frozen=True)
class Float8Memory(ProductMemory):
    """Products of which those of some linears compute in float8."""

    #: Linears by name in the block.
    names: frozenset[str] = frozenset()
    #: FSDP gathers their weights in float8.
    gathers: bool = False

    def op(self, product: Product) -> Op:
        plain = super().op(product)
        if product.key not in self.names:
            return plain
        n = product.tokens * product.columns
        m = product.tokens * product.rows
        size = product.size
        # A cast makes two tensors in float32 and the result.
        forward = max(9 * n - m * size, n + product.rows * product.columns)
        gradient = 9 * m - n * size
        if product.tp == 1:
            # It keeps the input, and casts it once more in the backward, beside two layouts of the
            # gradient.
            return replace(plain, forward=forward, backward=max(2 * m + 9 * n, gradient))
        # Its input is cast once: by the linear where it is this rank's part, else before it is
        # gathered.
        is_own_part = product.key.rpartition(".")[2] in ("wo", "w2")
        return replace(
            plain,
            saves=(),
            keeps=n if is_own_part else 0,
            forward=forward,
            backward=max(2 * m + n, gradient),
        )

    def kept_by_gather(self, numbers: int, takers: frozenset[str]) -> int:
        """If all takers are converted, they keep their shared input in float8, a byte a number."""
        return numbers if takers and takers <= self.names else 0

    def gathered_bytes(self, key: str) -> int:
        return 1 if self.gathers and key in self.names else 0


def converted_kinds(choices: Iterable[Float8Choice]) -> frozenset[str]:
    """Return the converted linears by name in the block. The first block stands for all."""
    first = [name for name in converted_names(choices) if name.startswith("layers.0.")]
    return frozenset(map(kind_of, first))
