"""Memory of one rank over a step, by part: of the formulas (`memory.py`) and of
`titanlite.cli.plan.memory_trace`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

GIB = 1024**3
#: Bytes of a number.
BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
#: Entries of a vocabulary that a model's flavor leaves to the tokenizer, where there is none.
VOCABULARY = 32_000
#: Parts of a rank's device memory, in the order of reports.
PARTS = (
    "parameters",  # this rank's shards, and buffers
    "gradients",  # this rank's shards
    "optimizer",
    "gathered weights",  # whole weights of the groups in use, in the dtype of products
    "activations",  # kept for the backward
    "logits and loss",
    "communication",  # buffers of all-gathers and reduce-scatters, with gradients not yet reduced
    "float8",  # copies of inputs and weights in float8
    "working memory",  # temporaries of the module that runs
)


@dataclass(frozen=True)
class Moment:
    """A rank's device memory at one moment of a step."""

    #: "forward", "backward" or "optimizer".
    phase: str
    #: The module that runs, as "layers.31"; empty in the optimizer.
    module: str
    #: Name of `PARTS` → bytes.
    parts: Mapping[str, int]

    @property
    def place(self) -> str:
        """`backward of layers.31`."""
        return f"{self.phase} of {self.module}" if self.module else self.phase

    @property
    def total(self) -> int:
        """Bytes of all parts."""
        return sum(self.parts.values())


@dataclass(frozen=True)
class RankMemory:
    """A rank's memory over a step that is not the first: optimizer state exists."""

    rank: int
    #: Moments in the order of the step.
    moments: tuple[Moment, ...]
    #: Part → bytes in host memory (CPU offload).
    host: Mapping[str, int] = field(default_factory=dict)

    @cached_property
    def peak(self) -> Moment:
        """The moment with most device bytes."""
        return max(self.moments, key=lambda moment: moment.total)


#: Share of the peak that CUDA's allocator holds beyond live tensors: rounding of blocks, and gaps
#: between them.
FRAGMENTATION = 0.05
#: Bytes of a GPU outside of the allocator: CUDA's context with the kernels of torch, and the
#: buffers of NCCL.
CONTEXT = round(1.5 * GIB)


def needed_bytes(memory: RankMemory) -> int:
    """Return a GPU's memory at the peak: live tensors, allocator, CUDA and NCCL."""
    return round((1 + FRAGMENTATION) * memory.peak.total) + CONTEXT
