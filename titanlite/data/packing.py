"""Documents packed into training sequences, each of which is found by its number.

Each document is BOS + ids + EOS. An epoch puts all documents one after the other in its own order, epochs
follow each other, and the endless stream is cut into windows of seq_len + 1 tokens with a stride of
seq_len: window w reads stream[w * seq_len : (w + 1) * seq_len] and predicts the token after each. So every
token but the very first is a target exactly once, across documents and epochs.

The windows of one pass are served in a mixed order: neighbours are of one document, and a batch of them would hold one
or two texts. Sequence i depends on i alone: any rank can serve it, and a run resumes from a number. Both orders are
computed from (seed, epoch) alone.
"""

from __future__ import annotations

from functools import lru_cache, partial

import numpy as np
from numpy.typing import NDArray

from titanlite.data import EndOfData
from titanlite.data.corpus import Corpus
from titanlite.data.rows import IGNORE, Row, Stateless
from titanlite.utils import counted


class PackedDataset(Stateless):
    """Sequences of one corpus by global index.

    Args:
        corpus: the tokenized documents.
        seq_len: tokens per sequence.
        seed: with the epoch, decides the order of documents.
        shuffle: a new order of documents and of windows each epoch; False: file order in all of them.
        epochs: passes over the corpus, or None for no end.
    """

    def __init__(
        self, corpus: Corpus, *, seq_len: int, seed: int = 0, shuffle: bool = True, epochs: int | None = None
    ) -> None:
        self.corpus, self.seq_len, self.seed, self.shuffle, self.epochs = corpus, seq_len, seed, shuffle, epochs
        # A block of windows touches two epochs, or three after many passes.
        self._epoch = lru_cache(maxsize=3)(self._find_epoch)
        # Another seed than for the order of documents, so that the two are not the same permutation.
        self._block = lru_cache(maxsize=2)(partial(epoch_order, self.sequences_per_epoch, ~seed))

    @property
    def documents(self) -> int:
        return len(self.corpus.offsets) - 1

    @property
    def tokens_per_epoch(self) -> int:
        """Tokens of one pass, BOS and EOS included."""
        return len(self.corpus.tokens)

    def describe(self) -> str:
        """Return the size of the text in words."""
        return f"{counted(self.documents, 'documents')}, {self.tokens_per_epoch:,} tokens per epoch"

    @property
    def sequences_per_epoch(self) -> int:
        """Sequences of one pass, the last one shared with the next pass."""
        return -(-self.tokens_per_epoch // self.seq_len)

    @property
    def total_sequences(self) -> int | None:
        """Sequences of all epochs, or None without an end.

        In a mixed order a few of them lie past the end of the text and hold no target. So the order does not depend on
        the number of epochs, and a run can be extended by more epochs.
        """
        if self.epochs is None:
            return None
        if self.shuffle:
            return self.epochs * self.sequences_per_epoch
        return self._windows_with_targets(self.epochs)

    def _windows_with_targets(self, epochs: int) -> int:
        return -(-(epochs * self.tokens_per_epoch - 1) // self.seq_len)

    @property
    def fingerprint(self) -> str:
        """Hex digest of texts, tokenizer and packing, without `settings`."""
        return self.corpus.fingerprint

    @property
    def settings(self) -> dict[str, int | bool | None]:
        """The settings that decide sequence i, besides the fingerprint."""
        return {"seq_len": self.seq_len, "seed": self.seed, "shuffle": self.shuffle, "epochs": self.epochs}

    def sequence(self, index: int) -> Row:
        """Return sequence `index`.

        After the last target of the last epoch labels are `IGNORE`. Raises EndOfData for an index at or
        above `total_sequences`.
        """
        if index < 0:
            raise IndexError(f"sequence {index}: indexes start at 0")
        total = self.total_sequences
        if total is not None and index >= total:
            epochs = counted(self.epochs or 0, "epochs")
            raise EndOfData(f"sequence {index}: this text has {counted(total, 'sequences')} in {epochs}")
        place = self.window(index)
        if self.epochs is not None and place >= self._windows_with_targets(self.epochs):
            return self.padding()
        window = self._stream(place * self.seq_len, self.seq_len + 1)
        tokens = np.full(self.seq_len, self.corpus.pad_id, dtype=np.int64)
        labels = np.full(self.seq_len, IGNORE, dtype=np.int64)
        tokens[: min(len(window), self.seq_len)] = window[: self.seq_len]
        labels[: len(window) - 1] = window[1:]
        return Row(tokens, labels)

    def padding(self) -> Row:
        """Return a sequence without targets, to fill up the last batch of finite data."""
        size = self.seq_len
        return Row(np.full(size, self.corpus.pad_id, dtype=np.int64), np.full(size, IGNORE, dtype=np.int64))

    def window(self, index: int) -> int:
        """Return the window of sequence `index`."""
        if not self.shuffle:
            return index
        block, place = divmod(index, self.sequences_per_epoch)
        return block * self.sequences_per_epoch + int(self._block(block)[place])

    def documents_in(self, index: int) -> list[int]:
        """Return the documents of the tokens of sequence `index`, in its order.

        Their numbers are those of the records, counted from 0 in the order of `corpus.files` and within each.
        """
        place = self.window(index)
        if self.epochs is not None and place >= self._windows_with_targets(self.epochs):
            return []
        return [document for document, _, _ in self._parts(place * self.seq_len, self.seq_len + 1)]

    def _stream(self, start: int, length: int) -> NDArray[np.unsignedinteger]:
        """Return tokens [start, start + length) of all epochs end to end; fewer at the end of finite data."""
        return np.concatenate([self.corpus.tokens[begin:end] for _, begin, end in self._parts(start, length)])

    def _parts(self, start: int, length: int) -> list[tuple[int, int, int]]:
        """Return the parts of `_stream`: (document, first and end of its tokens in the corpus)."""
        parts = []
        epoch, within = divmod(start, self.tokens_per_epoch)
        while length > 0 and (self.epochs is None or epoch < self.epochs):
            order, starts = self._epoch(epoch)
            place = int(np.searchsorted(starts, within, side="right")) - 1
            while length > 0 and place < len(order):
                document = int(order[place])
                begin = int(self.corpus.offsets[document]) + within - int(starts[place])
                end = min(begin + length, int(self.corpus.offsets[document + 1]))
                parts.append((document, begin, end))
                length -= end - begin
                within += end - begin
                place += 1
            epoch, within = epoch + 1, 0
        return parts

    def _find_epoch(self, epoch: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return (documents in order [n], stream position within the epoch at which each begins [n])."""
        order = epoch_order(self.documents, self.seed, epoch, self.shuffle)
        lengths = np.diff(self.corpus.offsets)[order]
        return order, np.cumsum(lengths) - lengths


_MASK = (1 << 64) - 1
_GAMMA = 0x9E3779B97F4A7C15


def epoch_order(count: int, seed: int, epoch: int, shuffle: bool = True) -> NDArray[np.int64]:
    """Return the indexes [count] in the order of `epoch`; in file order without `shuffle`.

    Indexes are sorted by a hash of (seed, epoch, index). The hash is SplitMix64 (Steele, Lea and Flood
    2014) in integer arithmetic. A generator of numpy's may change between versions, and a run resumed years later must
    still find its place. SplitMix64 is a bijection, so no two indexes of an epoch share a hash, and the order does not
    depend on the sort.
    """
    index = np.arange(count, dtype=np.int64)
    if not shuffle:
        return index
    key = _mix_int(_mix_int(seed & _MASK) ^ _mix_int((epoch + 1) * _GAMMA & _MASK))
    with np.errstate(over="ignore"):
        hashes = _mix(np.uint64(key) + index.astype(np.uint64) * np.uint64(_GAMMA))
    return np.argsort(hashes, kind="stable")


def _mix(z: NDArray[np.uint64]) -> NDArray[np.uint64]:
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def _mix_int(z: int) -> int:
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB & _MASK
    return z ^ (z >> 31)
