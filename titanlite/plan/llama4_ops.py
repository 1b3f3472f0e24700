"""What Llama 4's attention does with positions, for `titanlite.plan.blocks`.

titanlite/plan/FORMULAS.md derives the numbers. No torch here.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from titanlite.plan.lifetimes import Op

if TYPE_CHECKING:
    from titanlite.models.llama4_args import Llama4Args
    from titanlite.plan.blocks import Shape


def position_ops(s: Shape, args: Llama4Args) -> list[Op]:
    """Return the operators from "q" and "k" to "qr" and "kr". args: of the block."""
    heads = args.n_heads // s.tp
    groups = args.kv_heads // s.tp
    if args.rotary is not None:
        return [*_rotated(s, args, "q", heads), *_rotated(s, args, "k", groups)]
    if not args.temperature:
        return []
    # q times factors in float32, one for each token of a row, which are kept.
    numbers = s.tokens * heads * args.head_dim
    work = 4 * numbers if s.size == 2 else 0
    return [Op("qr", numbers * s.size, ("q",), forward=work, backward=2 * work)]


def unrotated_names(args: Llama4Args) -> tuple[str, str]:
    """Return the names of the products for q and k in a block without rotary positions: those that
    attention takes, where nothing is between.
    """
    return "q" if args.temperature else "qr", "kr"


def _rotated(s: Shape, args: Llama4Args, x: str, heads: int) -> list[Op]:
    """The pairs side by side, rotated, and divided by their root mean square."""
    width = heads * args.head_dim
    result = f"{x}r"
    pairs = Op(f"{x} pairs", s.tokens * width * s.size, (x,))
    if not args.unit_qk:
        return [pairs, s.rotation(result, pairs.name, width)]
    turned = s.rotation(f"{x} turned", pairs.name, width)
    norm = s.norm(result, turned.name, s.tokens * heads, args.head_dim)
    return [pairs, turned, replace(norm, weight=0)]
