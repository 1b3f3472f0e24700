"""Documents fitted whole into sequences, by best-fit decreasing (Ding et al. 2024, "Fewer
truncations improve language modeling").

A document longer than a sequence is cut into pieces of seq_len tokens first. A piece's last token
predicts the first of the next piece. Pieces form groups in the order of documents, and each group
is packed by itself. The longest piece goes first. Each goes into the fullest row that has room for
it. So neighbours in the text stay near each other, and the work is bounded.

Which documents share a row is decided once, by the seed. Each epoch serves the rows in another
order. So the number of rows is the same in every epoch, and sequence i is found without those
before it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from titanlite.data.epoch_order import epoch_order
from titanlite.data.rows import max_documents
from titanlite.data.sequences import PackedDataset, Range
from titanlite.data.tokenize_files import Tokens

#: Pieces that are packed together.
GROUP = 4096


class BestFitDataset(PackedDataset):
    """Sequences of whole documents by global index, with the arguments of `PackedDataset`.

    Every token is served once per epoch, and is a target once unless it is a document's first.
    """

    def __init__(
        self,
        corpus: Tokens,
        *,
        seq_len: int,
        seed: int = 0,
        shuffle: bool = True,
        **others: Any,
    ) -> None:
        super().__init__(corpus, seq_len=seq_len, seed=seed, shuffle=shuffle, **others)
        order = epoch_order(corpus.documents, seed, 0, shuffle)
        #: First token in the corpus of each piece, by rows; and the first piece of each row, with
        #: an end.
        self._begins, self._starts = packed(corpus.offsets, order, seq_len)

    @property
    def sequences_per_epoch(self) -> int:
        return len(self._starts) - 1

    @property
    def total_sequences(self) -> int | None:
        return None if self.epochs is None else self.epochs * self.sequences_per_epoch

    def describe(self) -> str:
        padding = 1 - self.tokens_per_epoch / (self.sequences_per_epoch * self.seq_len)
        return f"{super().describe()}, best-fit with {padding:.2%} padding"

    @property
    def settings(self) -> dict[str, Any]:
        cut = {"documents": self.corpus.cut} if self.corpus.cut else {}
        return {**super().settings, **cut, "packing": "best-fit"}

    def ranges(self, window: int) -> list[list[Range]]:
        row = window % self.sequences_per_epoch
        offsets = self.corpus.offsets
        begins = self._begins[self._starts[row] : self._starts[row + 1]]
        document_ends = offsets[np.searchsorted(offsets, begins, side="right")]
        ends = np.minimum(begins + self.seq_len + 1, document_ends)
        return [[one] for one in zip(begins.tolist(), ends.tolist(), strict=True)]


def packed(
    offsets: NDArray[np.int64], order: NDArray[np.int64], seq_len: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the first token of each piece [pieces], and the first piece of each row [rows + 1].

    A row is as early as its first piece in `order`.
    """
    pieces = -(-np.diff(offsets)[order] // seq_len)
    document = np.repeat(order, pieces)
    first_pieces = np.cumsum(pieces) - pieces
    number = np.arange(len(document)) - np.repeat(first_pieces, pieces)
    begins = offsets[document] + number * seq_len
    lengths = np.minimum(offsets[document + 1] - begins, seq_len)
    # Padding is one more.
    most = max_documents(seq_len) - 1
    row_of = np.empty(len(begins), dtype=np.int64)
    rows = 0
    for first in range(0, len(begins), GROUP):
        found = best_fit(lengths[first : first + GROUP].tolist(), seq_len, most)
        row_of[first : first + GROUP] = np.add(found, rows)
        rows += max(found) + 1
    # The first piece of each row decides its place among the rows.
    firsts = np.unique(row_of, return_index=True)[1]
    place = np.empty(rows, dtype=np.int64)
    place[np.argsort(firsts)] = np.arange(rows)
    places = place[row_of]
    by_row = np.argsort(places, kind="stable")
    starts = np.concatenate([[0], np.cumsum(np.bincount(places))])
    return begins[by_row], starts


def best_fit(lengths: Sequence[int], room: int, most: int) -> list[int]:
    """Return the row of each piece, longest first, in the fullest row that has room.

    `lengths` and `room` are in tokens; a row has at most `most` pieces.
    """
    row_of = [0] * len(lengths)
    #: Number of pieces in each row.
    pieces: list[int] = []
    by_room: defaultdict[int, list[int]] = defaultdict(list)
    #: Bit n: a row with room for n more tokens exists.
    rooms = 0
    for piece in sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True):
        length = lengths[piece]
        fitting = rooms >> length
        if fitting:
            left = (fitting & -fitting).bit_length() - 1
            row = by_room[length + left].pop()
            if not by_room[length + left]:
                rooms ^= 1 << (length + left)
        else:
            row = len(pieces)
            left = room - length
            pieces.append(0)
        row_of[piece] = row
        pieces[row] += 1
        if left and pieces[row] < most:
            by_room[left].append(row)
            rooms |= 1 << left
    return row_of
