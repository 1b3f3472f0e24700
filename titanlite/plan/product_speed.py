"""Time of the linears of a step, for `titanlite.plan.speed`.

A feature whose products are others replaces its fields.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from titanlite.models.linears import LinearKind
from titanlite.plan.rates import Directions


@dataclass(frozen=True)
class ProductSpeed:
    """A step's linears, in the dtype of activations."""

    #: All linears of the model, by kind.
    kinds: Sequence[LinearKind]
    #: First name of a kind → its peak FLOPS, where that is not that of activations.
    peaks: Mapping[str, float] = field(default_factory=dict)
    #: Sentences for the plan.
    assumptions: Sequence[str] = ()
    #: Eager products save inputs when they are done, so that recomputation runs to the end of a
    #: block.
    saves_inputs_late: bool = False
    #: Seconds of the casts of all blocks in one micro-batch.
    casts: Directions = Directions()
    #: Bytes that gathers of weights save.
    gathers_less: float = 0.0
    #: Collectives of a block that tensor parallelism saves.
    tensor_gathers_less: int = 0
