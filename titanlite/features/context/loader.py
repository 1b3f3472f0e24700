"""Each rank's part of the batches.

part = split_batch(batch, mesh)
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

from torch.distributed.device_mesh import DeviceMesh

from titanlite.data.loader import Batch
from titanlite.features.context.balanced_chunks import CPRank


def split_batch(batch: Batch, mesh: DeviceMesh) -> Batch:
    """Return this rank's part of a batch that is the same on all ranks of its "cp" group.

    Parts do not overlap, so valid tokens and losses add up over ranks. Without such ranks it is the
    batch itself.
    """
    cp_rank = CPRank.of(mesh)
    return batch if cp_rank.degree == 1 else _part(batch, cp_rank)


def _part(batch: Batch, cp_rank: CPRank) -> Batch:
    # Documents stay whole: attention and positions depend on those of the whole sequence.
    return Batch(cp_rank.part(batch.tokens), cp_rank.part(batch.labels), batch.documents)


class CPLoader:
    """Gives this rank's part of a loader's batches; position and state are the loader's."""

    def __init__(self, loader: Any, mesh: DeviceMesh) -> None:
        self.loader = loader
        self.cp_rank = CPRank.of(mesh)

    @property
    def steps_left(self) -> int | None:
        return cast("int | None", self.loader.steps_left)

    def next_step(self) -> list[Batch]:
        return [_part(batch, self.cp_rank) for batch in self.loader.next_step()]

    def state_dict(self) -> dict[str, Any]:
        return dict(self.loader.state_dict())

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.loader.load_state_dict(state)

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[Batch]:
        return (_part(batch, self.cp_rank) for batch in self.loader)
