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

from collections.abc import Sequence
from functools import lru_cache, partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from titanlite.data import EndOfData
from titanlite.data.corpus import Corpus
from titanlite.data.permutation import GAMMA, epoch_key
from titanlite.data.rows import IGNORE, Row, Stateless
from titanlite.utils import counted


class Part(NamedTuple):
    """Neighbouring tokens of one document in a sequence: the first and the end of them in the corpus."""

    document: int
    begin: int
    end: int


class PackedDataset(Stateless):
    """Sequences of one corpus by global index.

    Args:
        corpus: the tokenized documents.
        seq_len: tokens per sequence.
        seed: with the epoch, decides the order of documents.
        shuffle: a new order of documents and of windows each epoch; False: file order in all of them.
        epochs: passes over the corpus, or None for no end.
        mask_documents: rows tell which tokens are of one document.
    """

    def __init__(
        self,
        corpus: Corpus,
        *,
        seq_len: int,
        seed: int = 0,
        shuffle: bool = True,
        epochs: int | None = None,
        mask_documents: bool = False,
    ) -> None:
        self.corpus, self.seq_len, self.seed, self.shuffle, self.epochs = corpus, seq_len, seed, shuffle, epochs
        self.mask_documents = mask_documents
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
    def settings(self) -> dict[str, Any]:
        """The settings that decide sequence i, besides the fingerprint."""
        masks = {"mask_documents": True} if self.mask_documents else {}
        return {"seq_len": self.seq_len, "seed": self.seed, "shuffle": self.shuffle, "epochs": self.epochs, **masks}

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
        parts = self.parts(self.window(index))
        return self._row(parts) if parts else self.padding()

    def _row(self, parts: Sequence[Part]) -> Row:
        """Return the row of the parts of a window."""
        window = np.concatenate([self.corpus.tokens[part.begin : part.end] for part in parts])
        row = self.padding()
        row.tokens[: min(len(window), self.seq_len)] = window[: self.seq_len]
        labels = row.labels[: len(window) - 1]
        labels[:] = window[1:]
        if self.corpus.targets is not None:
            targets = np.concatenate([self.corpus.targets[part.begin : part.end] for part in parts])
            labels[~targets[1:]] = IGNORE
        lengths = [part.end - part.begin for part in parts]
        if self.mask_documents:
            labels[np.cumsum(lengths)[:-1] - 1] = IGNORE  # the first token of the next document
        return row._replace(documents=self.numbers(lengths))

    def numbers(self, lengths: Sequence[int]) -> NDArray[np.int32] | None:
        """Return `Row.documents` for documents of these lengths and padding; None without masks."""
        if not self.mask_documents:
            return None
        found = np.full(self.seq_len, len(lengths), dtype=np.int32)
        numbers = np.repeat(np.arange(len(lengths), dtype=np.int32), lengths)[: self.seq_len]
        found[: len(numbers)] = numbers
        return found

    def padding(self) -> Row:
        """Return a sequence without targets, to fill up the last batch of finite data."""
        tokens = np.full(self.seq_len, self.corpus.pad_id, dtype=np.int64)
        return Row(tokens, np.full(self.seq_len, IGNORE, dtype=np.int64), self.numbers([]))

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
        return [part.document for part in self.parts(self.window(index))]

    def document_lengths(self, index: int) -> list[int]:
        return [part.end - part.begin for part in self.parts(self.window(index))]

    def parts(self, window: int) -> list[Part]:
        """Return the parts of seq_len + 1 tokens from window * seq_len of all epochs end to end.

        Fewer tokens at the end of finite data; none where no target is left.
        """
        if self.epochs is not None and window >= self._windows_with_targets(self.epochs):
            return []
        start, length = window * self.seq_len, self.seq_len + 1
        parts = []
        epoch, within = divmod(start, self.tokens_per_epoch)
        while length > 0 and (self.epochs is None or epoch < self.epochs):
            order, starts = self._epoch(epoch)
            place = int(np.searchsorted(starts, within, side="right")) - 1
            while length > 0 and place < len(order):
                document = int(order[place])
                begin = int(self.corpus.offsets[document]) + within - int(starts[place])
                end = min(begin + length, int(self.corpus.offsets[document + 1]))
                parts.append(Part(document, begin, end))
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
    key = epoch_key(seed, epoch)
    with np.errstate(over="ignore"):
        hashes = _mix(np.uint64(key) + index.astype(np.uint64) * np.uint64(GAMMA))
    return np.argsort(hashes, kind="stable")


def _mix(z: NDArray[np.uint64]) -> NDArray[np.uint64]:
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))
