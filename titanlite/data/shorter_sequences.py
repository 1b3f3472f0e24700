"""Shorter sequences as pieces of rows, in a phase with another `seq_len` than the longest."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from titanlite.data.loader import Batch


def micro_batches(rows: Batch, pieces: int, size: int) -> list[Batch]:
    """Return micro-batches of `size` sequences each: every row cut into this many pieces."""
    cut = rows.map(lambda tensor: tensor.reshape(tensor.size(0) * pieces, -1))
    if cut.documents is not None:
        # They are numbered within each sequence.
        cut = cut._replace(documents=cut.documents - cut.documents[:, :1])
    return [_between(cut, first, first + size) for first in range(0, len(cut.tokens), size)]


def _between(batch: Batch, first: int, end: int) -> Batch:
    """Return sequences [first, end) of a batch."""
    return batch.map(lambda tensor: tensor[first:end])
