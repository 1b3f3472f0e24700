"""The operators of latent attention, for `titanlite.plan.blocks`. No torch here.

titanlite/plan/FORMULAS.md derives the numbers.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from titanlite.plan.lifetimes import Op

if TYPE_CHECKING:
    from titanlite.models.deepseek_v3 import DeepSeekV3Args
    from titanlite.plan.blocks import Shape


def latent_ops(s: Shape, a: DeepSeekV3Args) -> list[Op]:
    """Return the operators of `latent_attention.LatentAttention`, from "x" on."""
    heads = a.n_heads // s.tp
    width = heads * a.qk_head_dim
    results = heads * a.v_head_dim
    ops = [s.norm("n1", "x", s.rows, a.dim)]
    ops += _queries(s, a, heads)
    ops += _keys_and_values(s, a, heads)
    ops += s.attention(s, width, width, 4 * s.tokens * heads)
    # Without the zeros that values are filled up with, in the order of wo.
    ops.append(Op("cut", s.tokens * results * s.size, ("y",), backward=s.tokens * width * s.size))
    held = ("n1", "qr", "kr", "v", "y")
    ops.append(s.linear("o", "cut", a.dim, results, held, "attention.wo"))
    if s.tp > 1:
        ops.append(s.scatter("o part", "o", ("n1",)))
    return ops


def _queries(s: Shape, a: DeepSeekV3Args, heads: int) -> list[Op]:
    width = heads * a.qk_head_dim
    ops: list[Op] = []
    x = "n1"
    columns = a.dim
    key = "attention.wq"
    if a.q_lora_rank:
        columns = a.q_lora_rank
        key = "attention.wq_b"
        ops.append(_narrow(s, "qa", "n1", a.q_lora_rank, "attention.wq_a"))
        ops.append(s.norm("qn", "qa", s.rows, a.q_lora_rank))
        x = "qn"
    if s.tp > 1:
        ops.append(_gather(s, f"{x} whole", x, columns))
        x = f"{x} whole"
    ops.append(s.linear("q", x, width, columns, key=key))
    rotated = heads * a.qk_rope_head_dim
    # The pairs side by side, then rotated; all parts of a query in one tensor.
    ops.append(Op("q pairs", s.tokens * rotated * s.size, ("q",)))
    ops.append(s.rotation("q rope", "q pairs", rotated))
    whole = s.tokens * width * s.size
    scaled = a.score_factor != 1.0
    ops.append(Op("q all" if scaled else "qr", whole, ("q", "q rope")))
    if scaled:
        ops.append(Op("qr", whole, ("q all",), holds=("q all", "q")))
    return ops


def _keys_and_values(s: Shape, a: DeepSeekV3Args, heads: int) -> list[Op]:
    latent = a.kv_lora_rank + a.qk_rope_head_dim
    expanded = heads * (a.qk_nope_head_dim + a.v_head_dim)
    ops = [
        _narrow(s, "kva", "n1", latent, "attention.wkv_a"),
        Op("k pairs", s.tokens * a.qk_rope_head_dim * s.size, ("kva",)),
        s.rotation("k rope", "k pairs", a.qk_rope_head_dim),
        s.norm("kvn", "kva", s.rows, a.kv_lora_rank),
    ]
    x = "kvn"
    if s.tp > 1:
        x = "kvn whole"
        ops.append(_gather(s, x, "kvn", a.kv_lora_rank))
    ops.append(s.linear("kv", x, expanded, a.kv_lora_rank, key="attention.wkv_b"))
    whole = s.tokens * heads * a.qk_head_dim * s.size
    ops.append(Op("kr", whole, ("kv", "k rope"), holds=("kv", "kva", "k rope")))
    # As wide as queries.
    ops.append(Op("v", whole, ("kv",)))
    return ops


def _narrow(s: Shape, name: str, x: str, rows: int, key: str) -> Op:
    """A product of the rank's part of the sequence with a whole weight."""
    return replace(s, tokens=s.rows, tp=1).linear(name, x, rows, s.args.dim, key=key)


def _gather(s: Shape, name: str, x: str, width: int) -> Op:
    """Do as `Shape.gather`, for rows of `width` numbers."""
    whole = s.tokens * width * s.size
    return Op(name, whole, reads=(x,), forward=whole, backward=whole)
