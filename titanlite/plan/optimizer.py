"""Memory of optimizers by formulas: their state, and the temporary tensors of a step.

No torch here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from contextlib import suppress

from titanlite.config.model_sections import Optimizer
from titanlite.plan.parts import BYTES
from titanlite.plan.weights import Weight
from titanlite.utils import is_dotted


def state_bytes(weight: Weight, settings: Optimizer, master: int) -> float:
    """Return optimizer bytes per number of a weight. master: bytes of a number of the weights."""
    momentum, variance, rest = (
        BYTES[name]
        for name in (settings.momentum_dtype, settings.variance_dtype, settings.compensation_dtype)
    )
    rest *= settings.kahan
    by_name = {
        "AdamW": 2 * master,
        "Adam": 2 * master,
        "AnyPrecisionAdamW": momentum + variance + rest,
        "Muon": 4 if weight.matrix else 8,
    }
    if settings.name in by_name:
        return by_name[settings.name]
    return _asked(settings, master)


#: By settings, and bytes of a number of the weights.
_found: dict[tuple[str, int], float] = {}


def _asked(settings: Optimizer, master: int) -> float:
    """Return the bytes per number that an optimizer without a formula keeps.

    A step on the meta device tells them; those of AdamW where none can be taken there.
    """
    key = (repr(settings), master)
    if key not in _found:
        import torch

        from titanlite.optim.optimizer import build_optimizer

        dtype = torch.float32 if master == 4 else torch.bfloat16
        weight = torch.nn.Parameter(torch.empty(1024, 1024, device="meta", dtype=dtype))
        weight.grad = torch.empty_like(weight)
        _found[key] = 2 * master
        # Whatever the user's code raises: the start of a run tells it.
        with suppress(Exception):
            optimizer = build_optimizer({"weight": weight}, settings, weight.device)
            try:
                optimizer.step()
            except Exception:
                # It read a number. Most have made their state by then.
                if not optimizer.state[weight]:
                    raise
            state = optimizer.state[weight].values()
            size = sum(each.nbytes for each in state if isinstance(each, torch.Tensor))
            _found[key] = size / weight.numel()
    return _found[key]


def update_bytes(settings: Optimizer, master: int) -> float:
    """Return the bytes per parameter that an update and the norm before it move.

    Weight and state are read and written once, and the gradient is read twice: 32 for AdamW in
    float32.
    """
    # Those of many kernels, as counted on the null GPU, clipping included; for Kahan summation with
    # weights and states in bfloat16.
    counted = {"AnyPrecisionAdamW": 206 if settings.kahan else 154, "Muon": 98}
    return counted.get(settings.name) or 2 * (
        2 * master + state_bytes(Weight(1, 1, 1, (1, 1)), settings, master)
    )


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
