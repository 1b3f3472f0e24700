"""Seconds of a step's traffic between GPUs and to the host, for `titanlite.plan.speed`.

No torch here.
"""

from __future__ import annotations

from typing import NamedTuple

from titanlite.plan.rates import Directions
from titanlite.plan.step_sizes import StepSizes

# Traffic that computing waits for, of one micro-batch through all blocks


def tensor_traffic(step: StepSizes) -> float:
    """Return the seconds of tensor parallelism: 4 collectives per block and direction."""
    each = 2 if step.by_op else 4 - step.stops_early
    again = step.recomputed * each - step.products.tensor_gathers_less
    size = step.itemsize * step.tokens * step.width
    one = step.rates.collective(size, step.mesh.tensor, 1)
    return step.blocks * (8 + again) * one * step.tensor_traffic_left


# Traffic beside computing, of a step


class Sharding(NamedTuple):
    """Seconds of FSDP's traffic in a micro-batch."""

    #: All gathers of a forward, and of a backward.
    gather: float
    again: float
    #: The reduction of gradients, over copies too.
    reduce: float


def sharding(step: StepSizes) -> Sharding:
    """Return the seconds of gathers and reductions, if each micro-batch has all."""
    training = step.run.training
    collective = step.rates.collective
    units = step.units
    gradient = 2.0 if training.mixed_precision_reduce == "bfloat16" else 4.0
    gather = again = reduce = 0.0
    for index, (parameters, ranks, stride) in enumerate(step.sharded):
        # Parameters that are gathered in another dtype are in the first kind of group.
        less = step.products.gathers_less if index == 0 else 0
        whole = parameters * step.itemsize - less
        among = ranks
        if isinstance(training.reshard_after_forward, int):
            among = min(training.reshard_after_forward, ranks)
        gather += units * collective(whole / units, ranks, stride)
        again += units * collective(whole / units, among, stride) * step.frees
    for parameters, ranks, stride in step.reduced:
        reduce += units * collective(parameters * gradient / units, ranks, stride)
        part = 2 * parameters * gradient / ranks / units
        reduce += units * collective(part, step.mesh.dp_replicate, stride * ranks)
    return Sharding(gather, again, reduce)


def _gathers(step: StepSizes) -> int:
    never_freed = step.run.training.reshard_after_forward == "never"
    return 1 if never_freed else step.micro_batches


def _reductions(step: StepSizes) -> int:
    return step.micro_batches if step.run.training.gradient_sync == "every" else 1


def _beside(step: StepSizes, computing: Directions) -> Directions:
    """Return the computing that hides gathers and reductions: none for a single group."""
    return Directions(0.0, 0.0) if step.is_one_unit else computing


def sharding_traffic(step: StepSizes, computing: Directions) -> float:
    """Return the seconds of FSDP that computing does not hide, and those by which it slows
    computing.

    computing: seconds of a step.
    """
    one = sharding(step)
    gather = one.gather * _gathers(step)
    reduce = one.reduce * _reductions(step)
    traffic = Directions(gather, one.again * _gathers(step) + reduce)
    # Nothing runs beside the first unit and the last, nor beside a single one.
    seconds = 0.0 if step.is_one_unit else (gather + reduce) / step.units
    for own, other in zip(traffic, _beside(step, computing), strict=True):
        slower = step.rates.constants.contention * min(own, other)
        seconds += max(0.0, own - other) + slower
    return seconds


def host_transfers(step: StepSizes, computing: Directions) -> float:
    """Return the seconds of offload that computing does not hide."""
    pcie = step.rates.gpu.pcie
    gathers = _gathers(step)
    offloads = step.run.training.enable_cpu_offload
    one = step.held_bytes / pcie * offloads
    gradients = 4 * step.owned / pcie * offloads * _reductions(step)
    weights = Directions(one * gathers, one * gathers * step.frees + gradients)
    seconds = weights.beyond(_beside(step, computing))
    one_way = step.activation_transfers(step)
    return seconds + Directions(one_way, one_way).beyond(computing)
