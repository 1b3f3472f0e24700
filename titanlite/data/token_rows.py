"""Sequences of token files by their number, in an order that is computed place by place."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from titanlite.data import EndOfData
from titanlite.data.permutation import Permutation, epoch_key
from titanlite.data.rows import IGNORE, Row, Stateless
from titanlite.data.token_files import TokenFiles
from titanlite.utils import counted


class TokenRows(Stateless):
    """Sequences of token files by global index (see `titanlite.data.rows.Rows`).

    Epochs follow each other in the order of the files, and window w of the endless stream is its tokens
    [w * seq_len, (w + 1) * seq_len], with the token after each as its target. The windows of a pass are served in a
    keyed order, which is computed window by window. So every token but the very first is a target exactly once per
    epoch, and neither memory nor the time of a resume depends on the corpus.

    Args:
        files: the corpus.
        seq_len: tokens per sequence.
        seed: with the epoch, decides the order of windows.
        shuffle: a new order each epoch; False: file order.
        epochs: passes over the corpus, or None for no end.
        mask_documents: rows tell which document each token is of.
    """

    #: Share of padding in the sequences.
    padding_share = 0.0

    def __init__(
        self,
        files: TokenFiles,
        *,
        seq_len: int,
        seed: int = 0,
        shuffle: bool = True,
        epochs: int | None = None,
        mask_documents: bool = False,
    ) -> None:
        self.files, self.seq_len, self.seed, self.shuffle, self.epochs = files, seq_len, seed, shuffle, epochs
        self.mask_documents = mask_documents
        self._order = (-1, Permutation(1, 0))

    @property
    def documents(self) -> int:
        return self.files.documents

    @property
    def tokens_per_epoch(self) -> int:
        return self.files.tokens

    def describe(self) -> str:
        """Return the size of the text in words."""
        return f"{counted(self.documents, 'documents')}, {self.tokens_per_epoch:,} tokens per epoch, from token files"

    @property
    def sequences_per_epoch(self) -> int:
        """Sequences of one pass, the last one shared with the next pass."""
        return -(-self.files.tokens // self.seq_len)

    @property
    def total_sequences(self) -> int | None:
        """Sequences of all epochs, or None without an end. In a mixed order a few of them may hold no target."""
        if self.epochs is None:
            return None
        return self.epochs * self.sequences_per_epoch if self.shuffle else self._windows_with_targets(self.epochs)

    def _windows_with_targets(self, epochs: int) -> int:
        return -(-(epochs * self.files.tokens - 1) // self.seq_len)

    @property
    def fingerprint(self) -> str:
        return self.files.fingerprint

    @property
    def settings(self) -> dict[str, Any]:
        masked = {"mask_documents": True} if self.mask_documents else {}
        return {"seq_len": self.seq_len, "seed": self.seed, "shuffle": self.shuffle, "epochs": self.epochs, **masked}

    def window(self, index: int) -> int:
        """Return the window of sequence `index`."""
        if not self.shuffle:
            return index
        block, place = divmod(index, self.sequences_per_epoch)
        order = self._order  # another thread may replace it meanwhile
        if order[0] != block:
            order = self._order = block, Permutation(self.sequences_per_epoch, epoch_key(self.seed, block))
        return block * self.sequences_per_epoch + order[1](place)

    def _ranges(self, index: int) -> list[tuple[int, int]]:
        """Return the parts of the corpus that make sequence `index`, with the target of its last token."""
        if index < 0:
            raise IndexError(f"sequence {index}: indexes start at 0")
        total = self.total_sequences
        if total is not None and index >= total:
            epochs = counted(self.epochs or 0, "epochs")
            raise EndOfData(f"sequence {index}: this text has {counted(total, 'sequences')} in {epochs}")
        size, begin = self.files.tokens, self.window(index) * self.seq_len
        end = begin + self.seq_len + 1
        if self.epochs is not None:
            end = min(end, self.epochs * size)
        ranges: list[tuple[int, int]] = []
        while end - begin > 1 or (ranges and begin < end):  # one token alone has no target
            within = begin % size
            stop = min(end, begin - within + size)
            ranges.append((within, within + stop - begin))
            begin = stop
        return ranges

    def sequence(self, index: int) -> Row:
        """Return sequence `index`. Raises EndOfData at or above `total_sequences`, DataError for an impossible id."""
        ranges = self._ranges(index)
        if len(ranges) == 1 and ranges[0][1] - ranges[0][0] == self.seq_len + 1:
            ids = self.files.read(*ranges[0])
            tokens, labels = ids[:-1], ids[1:]
        elif not ranges:
            return self.padding()
        else:
            ids = np.concatenate([self.files.read(*one) for one in ranges])
            tokens, labels, _ = self.padding()
            tokens[: min(len(ids), self.seq_len)] = ids[: self.seq_len]
            labels[: len(ids) - 1] = ids[1:]
        if self.files.has_targets:
            targets = np.concatenate([self.files.targets(*one) for one in ranges])[1:]
            labels = labels.copy()
            labels[: len(targets)][~targets] = IGNORE
        return Row(tokens, labels, self._numbers(ranges) if self.mask_documents else None)

    def _numbers(self, ranges: list[tuple[int, int]]) -> NDArray[np.int32]:
        """Return the number of each token's document within the row [seq_len]; padding counts as one more."""
        begins, before = np.zeros(self.seq_len + 1, dtype=np.int32), 0
        for begin, end in ranges:
            begins[self.files.starts(begin, end) - begin + before] = 1
            before += end - begin
        begins[before:][:1] = 1
        return (np.cumsum(begins, dtype=np.int32) - 1)[: self.seq_len]

    def padding(self) -> Row:
        """Return a row without targets."""
        tokens = np.full(self.seq_len, self.files.pad_id, dtype=np.int64)
        numbers = np.zeros(self.seq_len, dtype=np.int32) if self.mask_documents else None
        return Row(tokens, np.full(self.seq_len, IGNORE, dtype=np.int64), numbers)

    def documents_in(self, index: int) -> list[int]:
        """Return the documents of the tokens of sequence `index`, by number from 0 in the order of the files."""
        return [document for one in self._ranges(index) for document in self.files.documents_in(*one)]

    def document_lengths(self, index: int) -> list[int]:
        ranges = self._ranges(index)
        return [n for begin, end in ranges for n in np.diff([*self.files.starts(begin, end), end]).tolist()]
