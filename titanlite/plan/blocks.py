"""The operators of a block and of the embedding, with what they keep: inputs of
`titanlite.plan.lifetimes`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, cast

from titanlite.models.llama import LlamaArgs
from titanlite.plan.feed_forward import FeedForwardMemory
from titanlite.plan.lifetimes import ModuleMemory, Op, OpList, Peak
from titanlite.plan.product_memory import Product, ProductMemory

if TYPE_CHECKING:
    from titanlite.models.deepseek_v3 import DeepSeekV3Args


def attention(s: Shape, width: int, kv_width: int, sums: int) -> list[Op]:
    """Return the operators of attention proper: "y" of "qr", "kr" and "v".

    width, kv_width: of rows of queries, and of keys and values. sums: bytes of the log-sum-exp.
    """
    taken = ("qr", "kr", "v")
    size = s.tokens * width * s.size
    y = Op("y", size, taken, saves=(*taken, "y"), keeps=sums, kind="attention")
    if "attention.sinks" not in s.args.attention_extras():
        return [y]
    # The kernel's result, and in float32 its product with a share, or with the gradient.
    forward = 3 * size if s.size == 2 else size
    backward = 4 * size if s.size == 2 else size
    return [replace(y, forward=forward + 2 * sums, backward=backward + 2 * sums)]


@dataclass(frozen=True)
class Shape:
    """A rank's work in one micro-batch."""

    #: Tokens of the rank (sequences * tokens of each, without those of other context-parallel
    #: ranks).
    tokens: int
    args: LlamaArgs
    #: Bytes of a number in activations and gathered weights: 2 or 4.
    size: int
    #: Ranks of tensor and context parallelism.
    tp: int = 1
    cp: int = 1
    products: ProductMemory = ProductMemory()
    feed_forward: FeedForwardMemory = FeedForwardMemory()
    attention: Callable[[Shape, int, int, int], list[Op]] = attention

    @property
    def rows(self) -> int:
        """Tokens between products, which tensor-parallel ranks divide."""
        return self.tokens // self.tp

    @property
    def hidden(self) -> int:
        """Bytes of their hidden states."""
        return self.rows * self.args.dim * self.size

    @property
    def whole(self) -> int:
        """Bytes of all tokens' hidden states."""
        return self.tokens * self.args.dim * self.size

    @property
    def norms_before(self) -> bool:
        return self.args.norm_placement != "after"

    @property
    def norms_after(self) -> bool:
        return self.args.norm_placement != "before"

    @property
    def vocabulary(self) -> int:
        return self.args.n_vocab // self.tp

    def gradient(self, size: int) -> int:
        """Return the bytes of the gradient of a weight of `size` bytes."""
        return size if self.products.trains else 0

    def input_of(self, x: str) -> tuple[str, ...]:
        """Return what a product keeps for its weight's gradient."""
        return (x,) if self.products.trains else ()

    def linear(
        self, name: str, x: str, rows: int, columns: int, holds: tuple[str, ...] = (), key: str = ""
    ) -> Op:
        """A product of all tokens with this rank's part of a weight [rows, columns]."""
        product = Product(name, x, self.tokens, rows, columns, self.size, self.tp, holds, key)
        return self.products.op(product)

    def norm(self, name: str, x: str, rows: int, width: int) -> Op:
        """`autograd.RMSNorm`, in float32: keeps x and a number per row, `OffsetRMSNorm` factors."""
        numbers = rows * width
        factors = 4 * width if self.args.norm_offset else 0
        return Op(
            name,
            numbers * self.size,
            reads=(x,),
            saves=(x,),
            keeps=4 * rows + factors,
            forward=(8 if self.size == 2 else 4) * numbers,
            backward=(14 if self.size == 2 else 8) * numbers,
            weight=self.gradient(width * self.size),
        )

    def rotation(self, name: str, x: str, width: int) -> Op:
        """`rope.Rotation` in float32: keeps nothing, since the tables need no gradient."""
        numbers = self.tokens * width
        return Op(
            name,
            numbers * self.size,
            reads=(x,),
            forward=(12 if self.size == 2 else 4) * numbers,
            backward=(10 if self.size == 2 else 4) * numbers,
        )

    def gather(self, name: str, x: str, takers: frozenset[str] = frozenset()) -> Op:
        """Gather the sequence: received by rank, then put in order; the gradient goes as in
        `scatter`.

        takers: linears that share the result.
        """
        kept = self.products.kept_by_gather(self.tokens * self.args.dim, takers)
        return Op(name, self.whole, reads=(x,), keeps=kept, forward=self.whole, backward=self.whole)

    def scatter(self, name: str, x: str, holds: tuple[str, ...]) -> Op:
        """Reduce the ranks' products, in order by rank, to their parts of the sequence."""
        return Op(
            name,
            self.hidden,
            reads=(x,),
            forward=self.whole,
            backward=self.whole,
            kind="other",
            holds=holds,
        )


def block_ops(s: Shape) -> OpList:
    """Return the operators of `titanlite.models.layers.Block.forward` on "x"."""
    ops = attention_ops(s)
    attention = ops[-1].name
    ops.append(Op("h", s.hidden, reads=("x", attention), passes=True))
    x = "h"
    if s.norms_before:
        x = "n2"
        ops.append(s.norm("n2", "h", s.rows, s.args.dim))
    ops += s.feed_forward.operators(s, x)
    if s.norms_after:
        ops.append(s.norm("f normed", ops[-1].name, s.rows, s.args.dim))
    ops.append(Op("out", s.hidden, reads=("h", ops[-1].name), passes=True, holds=("x",)))
    return OpList(ops, {"x": s.hidden})


def attention_ops(s: Shape) -> list[Op]:
    """Return attention's operators, from "x" on."""
    a = s.args
    if a.is_latent:
        from titanlite.plan.latent_ops import latent_ops

        return latent_ops(s, cast("DeepSeekV3Args", a))
    heads = a.n_heads // s.tp
    groups = a.kv_heads // s.tp
    width = heads * a.head_dim
    kv_width = groups * a.head_dim
    ops: list[Op] = []
    n1 = "x"
    if s.norms_before:
        n1 = "n1"
        ops.append(s.norm("n1", "x", s.rows, a.dim))
    if s.tp > 1:
        ops.append(
            s.gather("n1 whole", n1, frozenset(("attention.wq", "attention.wk", "attention.wv")))
        )
        n1 = "n1 whole"
    if a.neighbours_rotate:
        from titanlite.plan.llama4_ops import input_ops

        ops += input_ops(s, n1)
    else:
        query = "q"
        key = "k"
        ops.append(s.linear("q", n1, width, a.dim, key="attention.wq"))
        ops.append(s.linear("k", n1, kv_width, a.dim, key="attention.wk"))
        ops.append(s.linear("v", n1, kv_width, a.dim, key="attention.wv"))
        if a.qk_norm:
            query = "qn"
            key = "kn"
            for name, x, count in (("qn", "q", heads), ("kn", "k", groups)):
                if a.qk_norm_whole:
                    ops.append(s.norm(name, x, s.tokens, count * a.head_dim))
                else:
                    ops.append(s.norm(name, x, s.tokens * count, a.head_dim))
        ops.append(s.rotation("qr", query, width))
        ops.append(s.rotation("kr", key, kv_width))
    ops += s.attention(s, width, kv_width, 4 * s.tokens * heads)
    ops.append(s.linear("o", "y", a.dim, width, ("n1", n1, "qr", "kr", "v"), "attention.wo"))
    if s.tp > 1:
        ops.append(s.scatter("o part", "o", ("n1",)))
    if s.norms_after:
        ops.append(s.norm("o normed", ops[-1].name, s.rows, a.dim))
    return ops


def embedding(s: Shape, waits: bool) -> ModuleMemory:
    """Return the memory of the embedding, which keeps only tokens.

    waits: its whole gradient waits for the last micro-batch.
    """
    table = s.gradient(s.vocabulary * s.args.dim * s.size)
    if s.tp == 1:
        return ModuleMemory(0, Peak(s.hidden), Peak(s.hidden, table), table, s.hidden)
    # Tensor-parallel ranks look up their rows, put them in order and reduce them, and copy the
    # result. The backward gathers the gradient, makes that of the whole table, and copies this
    # rank's rows of it. Of a tied table the sum is a tensor beside both.
    ordered = 2 * s.whole + s.hidden
    made = table * s.tp
    backward = max(ordered, made + max(s.whole, 0 if waits else table))
    return ModuleMemory(0, Peak(ordered), Peak(backward), made if waits else table, s.hidden)
