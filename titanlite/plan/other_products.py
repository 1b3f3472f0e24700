"""Costs of products outside of a step's linears, for `titanlite.plan.speed`. No torch here.

A feature that has such products overrides it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

from titanlite.models.spec import Size

if TYPE_CHECKING:
    from titanlite.plan.step_sizes import StepSizes

#: Share of their peak that such products reach, in terms of the linears'.
_SHARE = 0.8


class Sharded(NamedTuple):
    """Parameters of a rank's stage that one kind of group shards."""

    parameters: float
    #: Number of ranks in the group, and the distance of its neighbours.
    ranks: int
    stride: int


class OtherProducts:
    """All products of a model whose spec names no linears; others have none."""

    #: Blocks have them beside their linears.
    beside_linears = False
    #: Parameters of all of them.
    parameters = 0.0
    #: Ranks with the same tokens that divide the rows.
    ranks = 1
    #: Numbers that they put out for a token of a micro-batch, on this rank.
    outputs = 0.0
    #: How many matrices of each size they have; none where sizes are not known.
    matrices: Mapping[Size, int] = {}

    def __init__(self, step: StepSizes) -> None:
        self.step = step
        #: FLOPs of a token, in the forward.
        self.flops = step.base_flops / 3 if step.spec.linears is None else 0.0

    @property
    def seconds(self) -> float:
        """Seconds of a micro-batch's forward."""
        step = self.step
        return self.flops * step.tokens / self.ranks / (step.rates.sustained * _SHARE)

    def sharded(self, others: Sharded) -> list[Sharded]:
        """Return what this rank's groups shard. others: parameters without these."""
        return [others]


class ExpertSpeed(OtherProducts):
    """The MoE layers' products, which `flops_per_token` has beyond linears.

    experts: name of each layer → number.
    """

    beside_linears = True

    def __init__(self, step: StepSizes, experts: Mapping[str, int]) -> None:
        super().__init__(step)
        # Each gives whole experts its part of the sequence.
        self.ranks = step.mesh.tensor
        # Sizes of the whole model; tensor-parallel ranks divide `StepSizes.linears`.
        linears = step.spec.linears(step.args) if step.spec.linears else {}
        weights = sum(size.in_features * size.out_features for size in linears.values())
        self.flops = max(step.base_flops / 3 - 2 * weights, 0.0)
        chosen = getattr(step.args, "top_k", 1)
        self.parameters = self.flops / 2 * min(experts.values()) / chosen
        # Numbers between the products of an expert; those of the stream where it is unknown.
        width = int(getattr(step.args, "expert_width", step.width))
        per_row = 2 * width + 2 * step.width
        self.outputs = len(experts) * chosen * per_row / self.ranks
        self.matrices = {Size(step.width, width): 3 * sum(experts.values())}

    def sharded(self, others: Sharded) -> list[Sharded]:
        """Expert parallelism leaves a rank some experts, which fewer ranks share."""
        mesh = self.step.mesh
        own = self.parameters * (self.step.stage_share / mesh.expert)
        if mesh.expert == 1:
            return [others._replace(parameters=others.parameters + own)]
        return [others, Sharded(own, mesh.expert_shards, mesh.expert)]
