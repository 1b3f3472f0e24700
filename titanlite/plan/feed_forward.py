"""Memory that the feed-forward of a block keeps, needs and holds, for `titanlite.plan.memory`.

A feature whose feed-forwards are others overrides it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from titanlite.plan.lifetimes import Op

if TYPE_CHECKING:
    from titanlite.plan.blocks import Shape
    from titanlite.plan.weights import Weight
    from titanlite.run.config import MeshSizes


@dataclass(frozen=True)
class FeedForwardMemory:
    """SwiGLU; all its weights are linears of the block."""

    def operators(self, s: Shape, x: str) -> list[Op]:
        """Return the operators from x on."""
        dim = s.args.dim
        width = s.args.ffn_width // s.tp
        before = x
        ops: list[Op] = []
        if s.tp > 1:
            x = "n2 whole"
            ops.append(s.gather(x, before, frozenset(("feed_forward.w1", "feed_forward.w3"))))
        ops.append(s.linear("g", x, width, dim, key="feed_forward.w1"))
        ops.append(s.linear("u", x, width, dim, key="feed_forward.w3"))
        # Its backward makes both gradients, and each has a second tensor of the same size beside
        # it.
        ops.append(Op("m", s.tokens * width * s.size, reads=("g", "u"), saves=("g", "u")))
        ops.append(s.linear("f", "m", dim, width, (before, x), "feed_forward.w2"))
        if s.tp > 1:
            ops.append(s.scatter("f part", "f", (before,)))
        return ops

    def weights(self, mesh: MeshSizes) -> Iterator[Weight]:
        """Yield weights other than linears."""
        return iter(())
