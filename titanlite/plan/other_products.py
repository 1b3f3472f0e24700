"""What products outside of a step's linears cost, for `titanlite.plan.speed`. No torch here.

A feature that has such products overrides it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from titanlite.models.spec import Size
    from titanlite.plan.step_sizes import StepSizes

#: Share of their peak that such products reach, in terms of the linears'.
_SHARE = 0.8


class Sharded(NamedTuple):
    """Parameters of a rank's stage that one kind of group shards."""

    parameters: float
    #: Of the group, and the distance of its neighbours.
    ranks: int
    stride: int


class OtherProducts:
    """All products of a model whose spec names no linears; other models have none of these."""

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
        """Seconds of a micro-batch, in the forward."""
        step = self.step
        return self.flops * step.tokens / self.ranks / (step.rates.sustained * _SHARE)

    def sharded(self, others: Sharded) -> list[Sharded]:
        """Return what this rank's groups shard. others: the parameters without these."""
        return [others]
