"""Documents packed into training sequences that can be asked for by number.

Each document is BOS + ids + EOS. An epoch puts all documents one after the other in its own order, epochs
follow each other, and the endless stream is cut into windows of seq_len + 1 tokens with a stride of
seq_len: window w reads stream[w * seq_len : (w + 1) * seq_len] and predicts the token after each. So every
token but the very first is a target exactly once, across documents and epochs.

Windows are served in blocks of as many as one pass holds, each block in an order of its own: neighbours are
of one document, and a batch made of them would be a batch of one or two texts. Sequence i depends on nothing
but i: any rank can serve it, and a run resumes from a number.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from titanlite.config.plans import DataPlan, ValidationPlan
from titanlite.data.corpus import Corpus
from titanlite.data.errors import DataError, EndOfData
from titanlite.data.order import epoch_order
from titanlite.data.sources import source_files
from titanlite.data.token_cache import load_corpus
from titanlite.data.tokenizer import Tokenizer
from titanlite.utils import counted

#: Label of a position that is no target.
IGNORE = -100


class PackedDataset:
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
        if seq_len < 1:
            raise DataError(f"training.seq_len: {seq_len} is not a length; it must be at least 1")
        if epochs is not None and epochs < 1:
            raise DataError(f"training.epochs: {epochs} is not a number of passes; it must be at least 1")
        self.corpus = corpus
        self.seq_len = seq_len
        self.seed = seed
        self.shuffle = shuffle
        self.epochs = epochs
        # Loaders in several threads may share a data set: these are replaced, never changed.
        self._orders: dict[int, tuple[NDArray[np.int64], NDArray[np.int64]]] = {}
        self._windows: dict[int, NDArray[np.int64]] = {}

    @property
    def documents(self) -> int:
        return len(self.corpus.offsets) - 1

    @property
    def tokens_per_epoch(self) -> int:
        """Tokens of one pass, BOS and EOS included."""
        return len(self.corpus.tokens)

    @property
    def sequences_per_epoch(self) -> int:
        """Sequences in which one pass is seen, the last one shared with the next pass."""
        return -(-self.tokens_per_epoch // self.seq_len)

    @property
    def total_sequences(self) -> int | None:
        """Sequences of all epochs, or None without an end.

        In a mixed order a few of them lie past the end of the text and hold no target: so an order does not depend on
        the number of epochs, and a run can be given more of them.
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
        """Hex digest of texts, tokenizer and packing; not of `settings`."""
        return self.corpus.fingerprint

    @property
    def settings(self) -> dict[str, int | bool | None]:
        """What besides the fingerprint decides sequence i."""
        return {"seq_len": self.seq_len, "seed": self.seed, "shuffle": self.shuffle, "epochs": self.epochs}

    def sequence(self, index: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Sequence `index`: (tokens [seq_len] int64, labels [seq_len] int64, shifted by one).

        After the last target of the last epoch labels are `IGNORE`. Raises EndOfData for an index at or
        over `total_sequences`.
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
        return tokens, labels

    def padding(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """A sequence without targets, to fill up the last batch of finite data."""
        return np.full(self.seq_len, self.corpus.pad_id, dtype=np.int64), np.full(self.seq_len, IGNORE, dtype=np.int64)

    def window(self, index: int) -> int:
        """The window that sequence `index` is."""
        if not self.shuffle:
            return index
        size = self.sequences_per_epoch
        block, place = divmod(index, size)
        order = self._windows.get(block)
        if order is None:
            # Another seed than the documents' order has, so that the two are not the same permutation.
            order = epoch_order(size, ~self.seed, block)
            self._windows = {**dict(list(self._windows.items())[-1:]), block: order}
        return block * size + int(order[place])

    def documents_in(self, index: int) -> list[int]:
        """The documents that sequence `index` has tokens of, in its order.

        Their numbers are those of the records, counted from 0 in the order of `corpus.files` and within each.
        """
        place = self.window(index)
        if self.epochs is not None and place >= self._windows_with_targets(self.epochs):
            return []
        return [document for document, _, _ in self._parts(place * self.seq_len, self.seq_len + 1)]

    def _stream(self, start: int, length: int) -> NDArray[np.unsignedinteger]:
        """Tokens [start, start + length) of all epochs end to end; fewer at the end of finite data."""
        return np.concatenate([self.corpus.tokens[begin:end] for _, begin, end in self._parts(start, length)])

    def _parts(self, start: int, length: int) -> list[tuple[int, int, int]]:
        """What `_stream` is made of: (document, first and end of its tokens in the corpus)."""
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

    def _epoch(self, epoch: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """(documents in order [n], stream position within the epoch at which each begins [n])."""
        found = self._orders.get(epoch)
        if found is None:
            order = epoch_order(self.documents, self.seed, epoch, self.shuffle)
            lengths = np.diff(self.corpus.offsets)[order]
            found = order, np.cumsum(lengths) - lengths
            # A block of windows touches two epochs, or three after many passes.
            self._orders = {**dict(sorted(self._orders.items())[-2:]), epoch: found}
        return found


def build_dataset(plan: DataPlan, tokenizer: Tokenizer, vocab_size: int) -> PackedDataset:
    """The training sequences of `plan`. Raises DataError as `source_files`, `iter_records` and `tokenize` do."""
    files = source_files(plan.dataset, plan.path)
    corpus = load_corpus(files, tokenizer, vocab_size, workers=plan.num_workers, cache=plan.token_cache)
    return PackedDataset(corpus, seq_len=plan.seq_len, seed=plan.seed, shuffle=plan.shuffle, epochs=plan.epochs)


def build_validation_dataset(
    plan: ValidationPlan, tokenizer: Tokenizer, vocab_size: int, reading: DataPlan | None = None
) -> PackedDataset:
    """One pass over the held-out text of `plan`, in file order; `reading` has the threads and the cache."""
    reading = reading or DataPlan()
    files = source_files(plan.dataset, plan.path, "validation")
    corpus = load_corpus(files, tokenizer, vocab_size, workers=reading.num_workers, cache=reading.token_cache)
    return PackedDataset(corpus, seq_len=plan.seq_len, shuffle=False, epochs=1)
