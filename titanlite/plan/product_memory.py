"""Memory that the products of a block keep and need, for `titanlite.plan.memory`.

A feature whose products are others overrides it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, NamedTuple

from titanlite.plan.lifetimes import Op

if TYPE_CHECKING:
    from titanlite.plan.weights import Weight


class Product(NamedTuple):
    """A product of all tokens with this rank's part of a weight [rows, columns]."""

    #: Names of its output and its input.
    name: str
    x: str
    tokens: int
    rows: int
    columns: int
    #: Bytes of a number in activations and gathered weights.
    size: int
    #: Ranks of tensor parallelism.
    tp: int
    #: The same as in `Op`.
    holds: tuple[str, ...]
    #: Name of its linear in the block; "" for others.
    key: str


@dataclass(frozen=True)
class ProductMemory:
    """Products in the dtype of activations."""

    #: Weights get gradients, those of norms and tables too.
    trains: ClassVar[bool] = True

    def op(self, product: Product) -> Op:
        return Op(
            product.name,
            product.tokens * product.rows * product.size,
            reads=(product.x,),
            saves=(product.x,),
            weight=product.rows * product.columns * product.size,
            kind="matmul",
            holds=product.holds,
        )

    def kept_by_gather(self, numbers: int, takers: frozenset[str]) -> int:
        """Return the bytes that the linears `takers` keep of gathered numbers."""
        return 0

    def gathered_bytes(self, key: str) -> int:
        """Return the bytes of a gathered number of a weight; 0: as of others."""
        return 0

    def weights(self, module: str, own: list[Weight], shards: int) -> list[Weight]:
        """Return what a rank holds of `own` weights, divided over `shards` ranks."""
        return own
