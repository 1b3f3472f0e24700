"""The definition of sequence i of a text.

Each document is BOS + ids + EOS. An epoch puts all documents one after the other, and epochs follow
each other. This endless stream is cut into windows of seq_len + 1 tokens with a stride of seq_len.
Window w reads stream[w * seq_len : (w + 1) * seq_len] and predicts the token after each. So every
token but the very first is a target exactly once, across documents and epochs.

Two orders mix the text, both computed from (seed, epoch) alone. The documents of an epoch are put
in a new order. The windows of a pass are then served in an order of their own: neighbours are of
one document, and a batch of them would hold one or two texts. Token files keep the order of their
documents. The order of their windows is computed place by place: memory and the time of a resume
do not depend on their size. `titanlite.data.epoch_order` has the arithmetic of both.

So sequence i depends on i alone: any rank can serve it. A step takes the next `global_batch`
numbers (`titanlite.data.loader`), and a checkpoint holds the next number, no more. Streams, whose
text is not at hand, have lanes instead (`titanlite.data.stream`).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from titanlite.data import EndOfData
from titanlite.data.epoch_order import Permutation, epoch_key, epoch_order
from titanlite.data.rows import FilePlace, Row, Rows, Window, make_row
from titanlite.data.tokenize_files import Tokens
from titanlite.utils import counted

#: Neighbouring tokens of a corpus: the first and the end of them.
Range = tuple[int, int]


class PackedDataset(Rows):
    """Sequences of one corpus by global index; they are a function of their number alone.

    Args:
        seq_len: tokens per sequence.
        seed: with the epoch, decides the order of documents and windows.
        shuffle: a new order each epoch, else file order.
        epochs: passes over the corpus, or None for no end.
        mask_documents: rows tell documents apart.
    """

    corpus: Tokens

    def __init__(
        self,
        corpus: Tokens,
        *,
        seq_len: int,
        seed: int = 0,
        shuffle: bool = True,
        epochs: int | None = None,
        mask_documents: bool = False,
    ) -> None:
        self.corpus = corpus
        self.seq_len = seq_len
        self.seed = seed
        self.shuffle = shuffle
        self.epochs = epochs
        self.mask_documents = mask_documents
        # A block of windows touches two epochs, or three after many passes.
        self._documents = lru_cache(maxsize=3)(self._documents_of)
        self._order = lru_cache(maxsize=2)(self._order_of)

    def sequence(self, index: int) -> Row:
        """Return sequence `index`; after the last epoch's last target labels are `IGNORE`.

        Raises EndOfData at or above `total_sequences`, DataError for an impossible id in a token
        file.
        """
        total = self.total_sequences
        if total is not None and index >= total:
            epochs = counted(self.epochs or 0, "epochs")
            raise EndOfData(
                f"sequence {index}: this text has {counted(total, 'sequences')} in {epochs}"
            )
        windows = [self._read(ranges) for ranges in self.ranges(self.window(index))]
        ids, targets, _ = windows[0] if windows else Window(np.empty(0))
        if len(ids) > self.seq_len and targets is None and not self.mask_documents:
            # Most rows: nothing to fill up or to leave out.
            ids = ids.astype(np.int64, copy=False)
            return Row(ids[:-1], ids[1:])
        return make_row(windows, self.seq_len, self.corpus.pad_id, self.mask_documents)

    def padding(self) -> Row:
        return make_row((), self.seq_len, self.corpus.pad_id, self.mask_documents)

    # From a number to a window, and from a window to tokens

    def window(self, index: int) -> int:
        if not self.shuffle:
            return index
        block, place = divmod(index, self.sequences_per_epoch)
        return block * self.sequences_per_epoch + self._order(block)(place)

    def _order_of(self, block: int) -> Callable[[int], int]:
        if self.corpus.keeps_order:
            return Permutation(self.sequences_per_epoch, epoch_key(self.seed, block))
        # Another seed than for the order of documents, so that the two are not the same
        # permutation.
        return epoch_order(self.sequences_per_epoch, ~self.seed, block).item

    def ranges(self, window: int) -> list[list[Range]]:
        """Return the parts of the corpus that make a row, for each of its windows.

        Without a target there are none. Here it is one window of seq_len + 1 tokens from token
        window * seq_len. Epochs are laid end to end.
        """
        size = self.corpus.size
        begin = window * self.seq_len
        end = begin + self.seq_len + 1
        if self.epochs is not None:
            end = min(end, self.epochs * size)
        if end - begin < 2:
            return []
        found: list[Range] = []
        while begin < end:
            epoch, within = divmod(begin, size)
            length = min(end - begin, size - within)
            found += self._within_epoch(epoch, within, length)
            begin += length
        return [found]

    def _within_epoch(self, epoch: int, begin: int, length: int) -> list[Range]:
        if not self.shuffle or self.corpus.keeps_order:
            return [(begin, begin + length)]
        order, starts = self._documents(epoch)
        place = int(np.searchsorted(starts, begin, side="right")) - 1
        found: list[Range] = []
        while length > 0:
            first, end = self.corpus.offsets[order[place] : order[place] + 2].tolist()
            first += begin - int(starts[place])
            end = min(first + length, end)
            found.append((first, end))
            length -= end - first
            begin += end - first
            place += 1
        return found

    def _documents_of(self, epoch: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return documents in order [n], and where each begins in the epoch's stream [n]."""
        order = epoch_order(self.corpus.documents, self.seed, epoch)
        lengths = np.diff(self.corpus.offsets)[order]
        return order, np.cumsum(lengths) - lengths

    def _read(self, ranges: Sequence[Range]) -> Window:
        corpus = self.corpus
        ids = np.concatenate([corpus.read(*one) for one in ranges])
        targets = None
        if corpus.has_targets:
            targets = np.concatenate([corpus.is_target(*one) for one in ranges])
        if not self.mask_documents:
            return Window(ids, targets)
        begins: list[NDArray[np.int64]] = []
        before = 0
        for begin, end in ranges:
            begins.append(corpus.begins_in(begin, end) - begin + before)
            before += end - begin
        return Window(ids, targets, np.concatenate(begins))

    # Length and identity

    @property
    def tokens_per_epoch(self) -> int:
        return self.corpus.size

    @property
    def sequences_per_epoch(self) -> int:
        """Sequences of one pass, the last one shared with the next pass."""
        return -(-self.tokens_per_epoch // self.seq_len)

    @property
    def total_sequences(self) -> int | None:
        """Sequences of all epochs, or None without an end.

        In a mixed order a few lie past the end and hold no target. So the order does not depend on
        the number of epochs.
        """
        if self.epochs is None:
            return None
        if self.shuffle:
            return self.epochs * self.sequences_per_epoch
        return -(-(self.epochs * self.tokens_per_epoch - 1) // self.seq_len)

    @property
    def fingerprint(self) -> str:
        return self.corpus.fingerprint

    @property
    def settings(self) -> dict[str, Any]:
        names = ("seq_len", "seed", "shuffle", "epochs")
        settings: dict[str, Any] = {name: getattr(self, name) for name in names}
        if self.mask_documents:
            settings["mask_documents"] = True
            if self.corpus.cut:
                settings["documents"] = self.corpus.cut
        return settings

    def describe(self) -> str:
        return self.corpus.describe()

    def documents_in(self, index: int) -> list[tuple[int, int]]:
        """Return documents by record number, from 0 in the files' order, see `Rows`."""
        found: list[tuple[int, int]] = []
        for begin, end in itertools.chain.from_iterable(self.ranges(self.window(index))):
            documents = self.corpus.documents_in(begin, end)
            lengths = np.diff(documents[:, 1], append=end)
            found += zip(documents[:, 0].tolist(), lengths.tolist(), strict=True)
        return found

    def place_of(self, document: int) -> FilePlace | None:
        return self.corpus.place_of(document)
