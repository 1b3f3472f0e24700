"""Sources of rows whose content is their number."""

from __future__ import annotations

from typing import Any

import numpy as np

from titanlite.data.rows import Row, Rows


class Numbers(Rows):
    """A source whose row i holds i; a stream notes the lanes that were asked for."""

    seq_len = 2
    tokens_per_epoch = None
    fingerprint = "ab" * 32
    total_sequences: int | None = None
    settings: dict[str, Any] = {"shuffle": True}

    def __init__(self, total: int | None = None, lanes: int | None = None) -> None:
        self.total_sequences = total
        self.noted_lanes = lanes
        self.asked: set[int] = set()

    def sequence(self, index: int) -> Row:
        assert self.total_sequences is None or index < self.total_sequences
        if self.noted_lanes:
            self.asked.add(index % self.noted_lanes)
        return Row(np.full(2, index), np.full(2, index))

    def padding(self) -> Row:
        return Row(np.zeros(2, dtype=np.int64), np.full(2, -100))

    def documents_in(self, index: int) -> list[tuple[int, int]]:
        return [(index, 2)]

    def describe(self) -> str:
        return "numbers"
