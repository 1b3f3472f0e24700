"""Attention over keys and values of all ranks, for `titanlite.plan.memory`. No torch here.

titanlite/plan/FORMULAS.md derives the numbers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from titanlite.plan.lifetimes import Op

if TYPE_CHECKING:
    from titanlite.plan.blocks import Shape


def attention_of_parts(s: Shape, width: int, kv_width: int, sums: int) -> list[Op]:
    """Return the operators of attention proper, as `titanlite.plan.blocks.attention`."""
    queries = s.tokens * width * s.size
    # Keys and values side by side, received from all ranks, put in order; gradients likewise, of
    # two calls.
    own = 2 * s.tokens * kv_width * s.size
    received = own * s.cp
    return [
        Op("keys", received, ("kr", "v"), forward=own + received, backward=own + received),
        Op(
            "parts",
            queries,
            reads=("qr", "keys"),
            saves=("qr", "keys", "parts"),
            keeps=sums,
            backward=received,
            kind="attention",
        ),
        # The results of both calls are joined, and put in wo's order.
        Op("joined", queries, ("parts",)),
        Op("y", queries, ("joined",), holds=("joined", "parts", "keys")),
    ]
