"""What Llama 4's attention does before its pairs, for `titanlite.plan.blocks`.

titanlite/plan/FORMULAS.md derives the numbers. No torch here.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, cast

from titanlite.plan.lifetimes import Op

if TYPE_CHECKING:
    from titanlite.models.llama4 import Llama4Args
    from titanlite.plan.blocks import Shape


def input_ops(s: Shape, x: str) -> list[Op]:
    """Return the operators from x to "qr", "kr" and "v"."""
    args = cast("Llama4Args", s.args)
    width = args.n_heads // s.tp * args.head_dim
    kv_width = args.kv_heads // s.tp * args.head_dim
    # Where nothing is between, attention takes the products themselves.
    query, key = "q", "k"
    if args.rotary is None:
        query, key = "q" if args.temperature else "qr", "kr"
    ops = [
        s.linear(query, x, width, args.dim, key="attention.wq"),
        s.linear(key, x, kv_width, args.dim, key="attention.wk"),
        s.linear("v", x, kv_width, args.dim, key="attention.wv"),
    ]
    if args.rotary is not None:
        return [*ops, *_rotated(s, args, "q", width), *_rotated(s, args, "k", kv_width)]
    if args.temperature:
        # q times factors in float32, one for each token of a row, which are kept.
        numbers = s.tokens * width
        work = 4 * numbers if s.size == 2 else 0
        ops.append(Op("qr", numbers * s.size, ("q",), forward=work, backward=2 * work))
    return ops


def _rotated(s: Shape, args: Llama4Args, x: str, width: int) -> list[Op]:
    """The pairs side by side, rotated and normalised."""
    result = f"{x}r"
    pairs = Op(f"{x} pairs", s.tokens * width * s.size, (x,))
    if not args.unit_qk:
        return [pairs, s.rotation(result, pairs.name, width)]
    turned = s.rotation(f"{x} turned", pairs.name, width)
    norm = s.norm(result, turned.name, s.tokens * width // args.head_dim, args.head_dim)
    return [pairs, turned, replace(norm, weight=0)]
