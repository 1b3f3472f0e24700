"""Batches of held-out text, for validation.

The loss of late parts of a sequence tells whether a model uses its context.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import torch

from titanlite.data import DataError
from titanlite.data.loader import Batch, check_rank, stack
from titanlite.data.rows import IGNORE, Rows


class PassLoader(Protocol):
    """A source of passes over a text, the same every time."""

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[Batch]: ...


class ValidationLoader:
    """The same held-out batches in every pass, the same number on every rank.

    Batch j of rank r holds sequences (j * batch_size + k) * dp_degree + r, k = 0 … batch_size - 1;
    those beyond the data have labels -100. `steps=-1` is one full pass. `steps > 0` is the first
    steps * batch_size * dp_degree sequences at most: results compare only if that product is equal.
    Text without an end needs `steps > 0`.
    """

    def __init__(
        self, dataset: Rows, batch_size: int, steps: int = -1, rank: int = 0, dp_degree: int = 1
    ) -> None:
        check_rank(rank, dp_degree)
        self.dataset = dataset
        self.batch_size = batch_size
        self.rank = rank
        self.dp_degree = dp_degree
        self._batches = steps
        total = dataset.total_sequences
        if total is None and steps == -1:
            raise DataError(
                "a full pass (steps = -1) needs a text with an end: give a number of batches"
            )
        if total is not None:
            full_pass = -(-total // (batch_size * dp_degree))
            self._batches = full_pass if steps == -1 else min(steps, full_pass)

    def __len__(self) -> int:
        return self._batches

    def __iter__(self) -> Iterator[Batch]:
        stride = self.batch_size * self.dp_degree
        for start in range(0, self._batches * stride, stride):
            yield stack(self.dataset, range(start + self.rank, start + stride, self.dp_degree))


class SequenceParts:
    """Serves each batch of a loader once for each part of its sequences, with its targets alone.

    So a pass takes `parts` times as long, but works in every layout: a model sees whole batches.
    Parts, first to last, differ by one target at most.
    """

    def __init__(self, loader: PassLoader, parts: int) -> None:
        self.loader = loader
        self.parts = parts

    def __len__(self) -> int:
        return len(self.loader) * self.parts

    def __iter__(self) -> Iterator[Batch]:
        for batch in self.loader:
            length = batch.labels.size(1)
            for part in range(self.parts):
                begin = part * length // self.parts
                end = (part + 1) * length // self.parts
                kept = torch.full_like(batch.labels, IGNORE)
                kept[:, begin:end] = batch.labels[:, begin:end]
                yield batch._replace(labels=kept)
