"""How fast a cluster computes, moves and sends: seconds of a product, of bytes, of a collective.

No torch here.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from titanlite.plan.hardware import Cluster, Gpu


@dataclass(frozen=True)
class Constants:
    """Rates that data sheets lack, fitted by `benchmarks/plan_speed.py` on published runs."""

    #: Share of its peak that a large product in float8 reaches, in terms of the GPU's `sustained`
    #: share in bf16.
    float8: float = 0.95
    #: A product loses as much as this many more columns and rows would cost.
    edge: float = 153.0
    #: Share of the memory's bandwidth that kernels reach.
    memory: float = 0.65
    #: Passes over the outputs of a block's linears in the forward by the kernels between products.
    #: The backward has twice as many.
    passes_eager: float = 6.33
    passes_compiled: float = 2.88
    #: Share of a link's and of a network's bandwidth that collectives reach.
    link: float = 0.8
    network: float = 0.8
    #: Computing is slowed for this share of the time in which traffic runs beside it.
    contention: float = 0.131
    #: Share of tensor-parallel traffic that remains with asynchronous tensor parallelism.
    async_tensor: float = 0.4
    #: Attention is slower by this share for each doubling of the ranks that share a sequence.
    context: float = 0.185


CONSTANTS = Constants()
#: Seconds that a collective takes beside its bytes, and more for each machine.
LATENCY = 20e-6
LATENCY_PER_NODE = 4e-6


class Directions(NamedTuple):
    """Seconds of a step or a micro-batch, forward and backward."""

    forward: float = 0.0
    backward: float = 0.0

    def beyond(self, computing: Directions) -> float:
        """Return the seconds that computing does not hide."""
        return sum(max(0.0, own - other) for own, other in zip(self, computing, strict=True))


@dataclass(frozen=True)
class Rates:
    """Rates of one GPU and its links, for activations of one dtype."""

    cluster: Cluster
    constants: Constants
    #: FLOPs per second of a product in that dtype, by the data sheet.
    peak: float

    @property
    def gpu(self) -> Gpu:
        return self.cluster.gpu

    @property
    def sustained(self) -> float:
        """FLOPs per second that large products reach."""
        return self.peak * self.gpu.sustained

    def product(self, rows: float, k: float, n: float, peak: float | None = None) -> float:
        """Return the seconds of a product. peak: of its dtype; None: of activations."""
        sustained = self.sustained if peak is None else peak * self.gpu.sustained
        return 2 * math.prod(size + self.constants.edge for size in (rows, k, n)) / sustained

    def moved(self, size: float) -> float:
        """Return the seconds in which kernels read or write this many bytes."""
        return size / (self.gpu.bandwidth * self.constants.memory)

    def collective(self, size: float, ranks: int, stride: int) -> float:
        """Return the seconds of an all-gather or reduce-scatter of `size` bytes in all.

        stride: distance of neighbours in ranks. A machine's ranks share its network.
        """
        if ranks == 1:
            return 0.0
        here = max(1, min(ranks, self.cluster.gpus_per_node // stride))
        nodes = -(-ranks // here)
        inside = 0.0
        if here > 1:
            inside = size * (ranks - 1) / ranks / (self.gpu.link * self.constants.link)
        # As many groups as `stride` share the machine's network.
        share = self.cluster.network * here / self.cluster.gpus_per_node * self.constants.network
        between = size * (nodes - 1) / nodes / share
        return LATENCY + LATENCY_PER_NODE * (nodes - 1) + max(inside, between)
