"""Memory of optimizers by formulas: their state, and the temporary tensors of a step.

No torch here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

from titanlite.config.model_sections import Optimizer
from titanlite.plan.parts import BYTES
from titanlite.utils import is_dotted

if TYPE_CHECKING:
    from titanlite.plan.weights import Weight


def state_bytes(weight: Weight, settings: Optimizer, master: int) -> float:
    """Return optimizer bytes per number of a weight; dotted paths count as AdamW.

    master: bytes of a number of the weights.
    """
    momentum, variance, rest = (
        BYTES[name]
        for name in (settings.momentum_dtype, settings.variance_dtype, settings.compensation_dtype)
    )
    rest *= settings.kahan
    by_name = {
        "AnyPrecisionAdamW": momentum + variance + rest,
        "Muon": 4 if weight.matrix else 8,
    }
    return by_name.get(settings.name, 2 * master)


def step_bytes(
    weights: Sequence[Weight], index: int, settings: Optimizer, master: int, device: str
) -> int:
    """Return a step's temporary bytes at its peak, beside gradients. index: of this shard."""
    sizes = [weight.local(index) for weight in weights]
    largest = 4 * max(sizes)
    if settings.name == "AnyPrecisionAdamW":
        # In float32 and for one weight at a time: gradient's square, both averages, the change and
        # the denominator.
        return 5 * largest
    if settings.name == "Muon":
        most = 4 * largest
        for weight, count in Counter(weights).items():
            if not weight.matrix:
                continue
            # As many weights of a shape at once as ranks share them.
            together = min(count, weight.shards)
            local = together * weight.part
            # The directions in float32, their stack and its copy in bfloat16; then whole matrices
            # on this rank.
            gather = (4 + 4 + 2) * local
            on_rank = -(-together // weight.shards)
            each = 4 * 2 * weight.numbers + 4 * min(weight.matrix) ** 2
            most = max(most, gather, (4 + 2) * local + on_rank * each)
        return most
    if is_dotted(settings.name):
        return 0
    how = settings.implementation or ("fused" if device == "cuda" else "foreach")
    # The roots of all variances at once, or of one weight.
    return {"fused": 0, "foreach": master * sum(sizes)}.get(how, 2 * largest)
