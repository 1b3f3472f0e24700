"""Batches of held-out text, for validation."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from titanlite.data import DataError
from titanlite.data.loader import Batch, check_rank, stack
from titanlite.data.rows import Rows


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
