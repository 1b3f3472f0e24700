"""The time of experts, for `titanlite.plan.speed`. No torch here.

titanlite/plan/FORMULAS.md derives the numbers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from titanlite.features.experts.ranks import expert_shards
from titanlite.models.spec import Size
from titanlite.plan.other_products import OtherProducts, Sharded

if TYPE_CHECKING:
    from titanlite.plan.step_sizes import StepSizes


class ExpertSpeed(OtherProducts):
    """The experts of a model's MoE layers: products that `flops_per_token` has beyond linears.

    experts: name of each layer → number of its experts.
    """

    beside_linears = True

    def __init__(self, step: StepSizes, experts: Mapping[str, int]) -> None:
        super().__init__(step)
        # Each gives whole experts its part of the sequence.
        self.ranks = step.mesh.tensor
        self.flops = max(step.base_flops / 3 - 2 * _weights_of_linears(step), 0.0)
        chosen = chosen_experts(step)
        self.parameters = self.flops / 2 * min(experts.values()) / chosen
        # Numbers between the products of an expert; those of the stream where it is unknown.
        width = int(getattr(step.args, "expert_width", step.width))
        per_row = 2 * width + 2 * step.width
        self.outputs = len(experts) * chosen * per_row / self.ranks
        self.matrices = {Size(step.width, width): 3 * sum(experts.values())}

    def sharded(self, others: Sharded) -> list[Sharded]:
        """Expert parallelism leaves a rank a part of the experts, which fewer ranks share."""
        mesh = self.step.mesh
        own = self.parameters * (self.step.stage_share / mesh.expert)
        if mesh.expert == 1:
            return [others._replace(parameters=others.parameters + own)]
        return [others, Sharded(own, expert_shards(mesh), mesh.expert)]


def _weights_of_linears(step: StepSizes) -> int:
    """Return the weights of all linears of the whole model."""
    # Tensor-parallel ranks divide those of `StepSizes.linears`.
    if step.spec.linears is None:
        return 0
    sizes = step.spec.linears(step.args).values()
    return sum(size.in_features * size.out_features for size in sizes)


def chosen_experts(step: StepSizes) -> int:
    """Return the experts of a token."""
    return getattr(step.args, "top_k", 1)


def exchange_seconds(step: StepSizes) -> float:
    """Return the seconds in which a micro-batch's rows and gradients go to their experts and back.

    Two all-to-alls in a block's forward, two in its backward, and those of recomputation.
    """
    mesh = step.mesh
    tokens = step.tokens / mesh.tensor
    rows = tokens * chosen_experts(step) * step.itemsize * step.width
    again = 0 if step.by_op else 2 * step.recomputed
    return step.blocks * (4 + again) * step.rates.collective(rows, mesh.expert, 1)
