"""Ranks that share each sequence, and their parts of it.

A sequence is cut into twice as many chunks as there are ranks, and rank r takes chunk r and chunk r
from the end. Under a causal mask an early chunk has few keys and a late one many. So all ranks have
equally many pairs of query and key (Llama 3, 2024, section 3.3.2).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed._functional_collectives as collectives
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from titanlite.dist import ParallelismError

#: The differentiable all-gather: its backward is a reduce-scatter. torch 2.13 renamed it.
_all_gather: Any = (
    getattr(collectives, "all_gather_single_autograd", None)
    or collectives.all_gather_tensor_autograd
)


@dataclass
class CPRank:
    """One rank among those that share each sequence."""

    rank: int
    degree: int
    group: ProcessGroup
    #: Tokens of the whole sequence in the forward pass under way.
    seq_len: int = 0

    @classmethod
    def of(cls, mesh: DeviceMesh) -> CPRank:
        return cls(mesh.get_local_rank("cp"), mesh["cp"].size(), mesh.get_group("cp"))

    @property
    def chunks(self) -> tuple[int, int]:
        """Return the two chunks of this rank, of 2 * degree."""
        return self.rank, 2 * self.degree - 1 - self.rank

    def part(self, x: Tensor, dim: int = 1) -> Tensor:
        """Return a copy of this rank's two chunks of x along `dim`, the sequence.

        Raises ParallelismError if x cannot be cut into equal chunks.
        """
        chunk, rest = divmod(x.size(dim), 2 * self.degree)
        if rest or not chunk:
            raise ParallelismError(
                f"a sequence of {x.size(dim)} tokens cannot be cut into 2 equal chunks for each "
                f"of {self.degree} ranks. Its length must be a multiple of {2 * self.degree}"
            )
        return torch.cat([x.narrow(dim, index * chunk, chunk) for index in self.chunks], dim)

    def gather(self, x: Tensor, dim: int) -> Tensor:
        """Return the whole from every rank's `part`; differentiable."""
        parts = _all_gather(x.unsqueeze(0).contiguous(), 0, self.group).unbind(0)
        # Each `unbind` and `chunk` is one node of the graph, whose backward makes one copy; a
        # slice's makes one each.
        heads, tails = zip(*(part.chunk(2, dim) for part in parts), strict=True)
        return torch.cat((*heads, *reversed(tails)), dim)
