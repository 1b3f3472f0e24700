"""Experts with biases and a clamped SwiGLU (`titanlite.models.gpt_oss_layers`), for
`titanlite.plan.memory`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from titanlite.features.experts.plan_memory import ExpertMemory
from titanlite.plan.lifetimes import Op
from titanlite.plan.weights import Weight

if TYPE_CHECKING:
    from titanlite.plan.blocks import Shape
    from titanlite.start.derive import MeshSizes


class BiasedExpertMemory(ExpertMemory):
    """Experts whose gate and up are one matrix, with biases."""

    def products(self, s: Shape, x: str) -> list[Op]:
        a = self.args
        rows = s.tokens * a.top_k
        numbers = rows * a.expert_width
        inner = numbers * s.size
        outer = rows * a.dim * s.size
        weight = s.gradient(self.held * a.dim * a.expert_width * s.size)
        # Numbers in float32: in the backward five and two masks, of which two are the gradient
        # itself if that is in float32.
        forward = 12 * numbers
        backward = 22 * numbers if s.size == 2 else 14 * numbers
        return [
            Op("pairs", 2 * inner, reads=(x,), saves=(x,), weight=2 * weight, kind="matmul"),
            Op(
                "m",
                inner,
                reads=("pairs",),
                saves=("pairs",),
                keeps=8 * rows,
                forward=forward,
                backward=backward,
            ),
            Op(
                "d",
                outer,
                reads=("m",),
                saves=("m",),
                weight=weight,
                kind="matmul",
                holds=(x, "pairs"),
            ),
            Op("e", outer, reads=("d",), passes=True, forward=outer, holds=(x, "pairs", "m")),
        ]

    def matrices(self) -> list[tuple[int, int]]:
        dim = self.args.dim
        width = self.args.expert_width
        return [(dim, 2 * width), (width, dim)]

    def weights(self, mesh: MeshSizes) -> Iterator[Weight]:
        """Add the biases."""
        yield from super().weights(mesh)
        over = mesh.weight_shards // self.ranks
        for length in (2 * self.args.expert_width, self.args.dim):
            if self.ranks == 1:
                yield Weight(self.held, length, over)
            else:
                stack = (self.held * length, 1)
                yield Weight(*stack, over, copied=True, neighbours=self.ranks)
        yield Weight(self.args.n_experts, 1, mesh.weight_shards)
