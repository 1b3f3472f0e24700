"""Held-out batches by the place of their targets in the sequence.

The loss of late parts tells whether a model uses its context, and whether a longer one works.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch

from titanlite.data.loader import Batch
from titanlite.data.rows import IGNORE

if TYPE_CHECKING:
    from titanlite.data.prefetch import PassLoader


class SequenceParts:
    """Serves each batch of a loader once for each part of its sequences, with the targets of that
    part alone.

    So a pass takes `parts` times as long. It works in every layout, as a model sees whole batches.

    parts: equal parts of a sequence, first to last; they differ by one target at most.
    """

    def __init__(self, loader: PassLoader, parts: int) -> None:
        self.loader = loader
        self.parts = parts

    def __len__(self) -> int:
        return len(self.loader) * self.parts

    def __iter__(self) -> Iterator[Batch]:
        for batch in self.loader:
            for part in range(self.parts):
                yield batch._replace(labels=self._labels_of(batch.labels, part))

    def _labels_of(self, labels: torch.Tensor, part: int) -> torch.Tensor:
        """Return labels [batch, seq] without targets outside of a part."""
        length = labels.size(1)
        begin = part * length // self.parts
        end = (part + 1) * length // self.parts
        kept = torch.full_like(labels, IGNORE)
        kept[:, begin:end] = labels[:, begin:end]
        return kept
