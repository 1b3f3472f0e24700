"""The operators of a mixture of experts, in the place of a block's feed-forward."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from titanlite.plan.lifetimes import Op

if TYPE_CHECKING:
    from titanlite.models.mixtral import MixtralArgs
    from titanlite.plan.blocks import Shape


def mixture_ops(s: Shape, a: MixtralArgs) -> list[Op]:
    """Return the operators of `moe.MoE`, with as many rows for each expert."""
    numbers = s.tokens * a.dim
    rows = s.tokens * a.top_k
    inner = rows * a.ffn_width * s.size
    outer = rows * a.dim * s.size
    weight = a.n_experts // s.ep * a.dim * a.ffn_width * s.size
    router = s.linear("gate", "n2", a.n_experts, a.dim)
    # The router keeps logits and probabilities in float32, and the places of rows in int64.
    probabilities = s.tokens * a.n_experts * 4
    ops = [
        replace(router, keeps=probabilities * 3 + rows * 8 * 2),
        Op("rows", outer, ("n2",), backward=outer),
    ]
    x = "rows"
    if s.ep > 1:
        # Received, then put in the order of the experts.
        x = "sorted"
        ops.append(Op("sent", outer, ("rows",), kind="other", backward=outer))
        ops.append(Op("sorted", outer, ("sent",)))
    ops += [
        Op("g", inner, reads=(x,), saves=(x,), weight=weight, kind="matmul"),
        Op("u", inner, reads=(x,), saves=(x,), weight=weight, kind="matmul"),
        Op("m", inner, reads=("g", "u"), saves=("g", "u")),
        Op("e", outer, reads=("m",), saves=("m",), weight=weight, kind="matmul", holds=(x,)),
    ]
    y = "e"
    if s.ep > 1:
        y = "returned"
        ops.append(Op("back", outer, ("e",), backward=outer))
        ops.append(Op("returned", outer, ("back",), kind="other"))
    # Weighted sums in float32, one of the experts at a time; the backward takes a copy of the
    # gradient in float32.
    work = 8 * numbers + numbers * s.size
    ops.append(
        Op(
            "f",
            numbers * s.size,
            reads=(y, "gate"),
            saves=(y,),
            forward=work,
            backward=work,
            holds=("n2", x),
        )
    )
    return ops
