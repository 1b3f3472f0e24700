"""MoE layers in the place of the blocks' feed-forwards, for `titanlite.plan.memory`.

titanlite/plan/FORMULAS.md derives the numbers. No torch here.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from titanlite.models.experts.arguments import ExpertArgs
from titanlite.plan.feed_forward import FeedForwardMemory
from titanlite.plan.lifetimes import Op
from titanlite.plan.weights import Weight

if TYPE_CHECKING:
    from titanlite.models.llama import LlamaArgs
    from titanlite.plan.blocks import Shape
    from titanlite.run.config import MeshSizes


@dataclass(frozen=True)
class ExpertMemory(FeedForwardMemory):
    """Memory that a block's experts and router keep, need and hold."""

    args: ExpertArgs
    #: Ranks that share the experts; 1: each has all of them.
    ranks: int

    @property
    def held(self) -> int:
        return self.args.n_experts // self.ranks

    def operators(self, shape: Shape, x: str) -> list[Op]:
        """Return the operators of `experts.layer.MoE` from x on, with equal rows per expert."""
        # Tensor-parallel ranks give their part of the sequence to whole experts.
        s = replace(shape, tokens=shape.rows, tp=1)
        routed = self._routed(s, x)
        if not self.args.shared_width:
            return routed
        width = self.args.shared_width
        dim = self.args.dim
        result = routed[-1].name
        inner = s.tokens * width * s.size
        return [
            *routed,
            s.linear("shared g", x, width, dim, (result,), "feed_forward.shared.w1"),
            s.linear("shared u", x, width, dim, (result,), "feed_forward.shared.w3"),
            Op("shared m", inner, ("shared g", "shared u"), saves=("shared g", "shared u")),
            s.linear("shared f", "shared m", dim, width, (result,), "feed_forward.shared.w2"),
            Op("both", s.whole, reads=(result, "shared f"), passes=True, holds=(x,)),
        ]

    def _routed(self, s: Shape, x: str) -> list[Op]:
        a = self.args
        numbers = s.tokens * a.dim
        rows = s.tokens * a.top_k
        outer = rows * a.dim * s.size
        router = s.linear("gate", x, a.n_experts, a.dim)
        # The router keeps probabilities in float32, for a z-loss logits too, and the places of rows
        # in int64.
        probabilities = s.tokens * a.n_experts * 4
        kept = probabilities * 2 + rows * 8 * 2
        if a.score == "softmax_of_chosen":
            # The choice keeps logits, weights and chosen experts.
            kept = probabilities * 2 + rows * (8 * 3 + 4)
            if a.z_loss:
                kept += s.tokens * 4
        elif a.z_loss:
            kept += probabilities
        ops = [
            replace(router, keeps=kept),
            Op("rows", outer, (x,), backward=outer),
        ]
        # The variable of `MoE.forward` holds what the experts take until their sums are there.
        taken = "rows"
        if a.scales_input:
            # Products in float32, forward, and backward for rows and for weights.
            product = rows * a.dim * 4
            cast = product if s.size == 2 else 0
            taken = "scaled"
            reads = ("rows", "gate")
            backward = 2 * cast + product
            ops.append(Op(taken, outer, reads, saves=("rows",), forward=cast, backward=backward))
        own = taken
        if self.ranks > 1:
            # Received, then put in the order of the experts.
            ops.append(Op("sent", outer, (taken,), kind="other", backward=outer))
            own = "sorted"
            ops.append(Op(own, outer, ("sent",)))
        ops += self.products(s, own)
        y = "e"
        if self.ranks > 1:
            y = "returned"
            ops.append(Op("back", outer, ("e",), backward=outer))
            # Variables of `Experts.forward` hold rows and results of this rank's experts.
            ops.append(Op("returned", outer, ("back",), kind="other", holds=(own, "e")))
        # Weighted sums in float32, one of the experts at a time, before their output; the backward
        # takes a copy of the gradient in float32.
        work = 8 * numbers
        ops.append(
            Op(
                "f",
                numbers * s.size,
                reads=(y, "gate"),
                saves=(y,),
                forward=work,
                backward=work + numbers * s.size,
                holds=(x, taken),
            )
        )
        return ops

    def products(self, s: Shape, x: str) -> list[Op]:
        """Return the operators of products: "e" of rows "x"."""
        a = self.args
        rows = s.tokens * a.top_k
        numbers = rows * a.expert_width
        inner = numbers * s.size
        outer = rows * a.dim * s.size
        weight = s.gradient(self.held * a.dim * a.expert_width * s.size)
        if a.expert_biases:
            # A clamped SwiGLU keeps numbers in float32: in the backward five and two masks. Two of
            # them are the gradient itself if that is in float32.
            forward = 12 * numbers
            backward = 22 * numbers if s.size == 2 else 14 * numbers
            held = (x, "pairs")
            return [
                Op("pairs", 2 * inner, (x,), saves=(x,), weight=2 * weight, kind="matmul"),
                Op("m", inner, ("pairs",), ("pairs",), 8 * rows, forward, backward),
                Op("d", outer, ("m",), saves=("m",), weight=weight, kind="matmul", holds=held),
                Op("e", outer, ("d",), passes=True, forward=outer, holds=(*held, "m")),
            ]
        kept = s.input_of(x)
        last = Op("e", outer, ("m",), s.input_of("m"), weight=weight, kind="matmul", holds=(x,))
        if a.joined_experts:
            return [
                Op("pairs", 2 * inner, (x,), kept, weight=2 * weight, kind="matmul"),
                # Its backward makes both gradients, and then puts them together.
                Op("m", inner, ("pairs",), saves=("pairs",), backward=2 * inner),
                last,
            ]
        return [
            Op("g", inner, (x,), kept, weight=weight, kind="matmul"),
            Op("u", inner, (x,), kept, weight=weight, kind="matmul"),
            Op("m", inner, ("g", "u"), saves=("g", "u")),
            last,
        ]

    def weights(self, mesh: MeshSizes) -> Iterator[Weight]:
        """Yield the router's matrix, and a rank's stacked experts and biases."""
        router = (self.args.n_experts, self.args.dim)
        yield Weight(*router, mesh.weight_shards, matrix=router)
        over = mesh.expert_shards
        dim = self.args.dim
        width = self.args.expert_width
        matrices = [(width, dim), (dim, width), (width, dim)]
        if self.args.joined_experts or self.args.expert_biases:
            matrices = [(dim, 2 * width), (width, dim)]
        for rows, columns in matrices:
            # In expert parallelism, or where ranks cannot share whole experts, each matrix is
            # divided.
            can_divide = rows % over == 0 or columns % over == 0
            divides = self.ranks > 1 or (self.held % over != 0 and can_divide)
            if not divides:
                stack = (self.held, rows * columns)
            elif rows % over == 0:
                stack = (self.held * rows, columns)
            else:
                stack = (self.held * columns, rows)
            matrix = (rows, columns)
            copied = divides and over > 1
            yield Weight(*stack, over, matrix=matrix, copied=copied, neighbours=self.ranks)
        if not self.args.expert_biases:
            return
        for length in (2 * width, dim):
            if self.ranks == 1:
                yield Weight(self.held, length, over)
            else:
                stack = (self.held * length, 1)
                yield Weight(*stack, over, copied=over > 1, neighbours=self.ranks)
        yield Weight(self.args.n_experts, 1, mesh.weight_shards)


def feed_forward_of(args: LlamaArgs, ranks: int) -> FeedForwardMemory:
    """Return the experts or the dense feed-forward of a block. ranks: that share the experts."""
    if not isinstance(args, ExpertArgs) or not args.n_experts:
        return FeedForwardMemory()
    return ExpertMemory(args, ranks)
