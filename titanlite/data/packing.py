"""Documents packed into training sequences, each of which is found by its number.

Each document is BOS + ids + EOS. An epoch puts all documents one after the other, and epochs follow
each other. This endless stream is cut into windows of seq_len + 1 tokens with a stride of seq_len.
Window w reads stream[w * seq_len : (w + 1) * seq_len] and predicts the token after each. So every
token but the very first is a target exactly once, across documents and epochs.

The windows of one pass are served in a mixed order. Neighbours are of one document, and a batch of
them would hold one or two texts. Sequence i depends on i alone: any rank can serve it, and a run
resumes from a number. All orders are computed from (seed, epoch). Documents of text are put in a
new order each epoch, too. Token files keep theirs. The order of their windows is computed place by
place. Memory and the time of a resume do not depend on their size.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from titanlite.data import EndOfData
from titanlite.data.corpus import Tokens
from titanlite.data.permutation import Permutation, epoch_key, epoch_order
from titanlite.data.rows import IGNORE, FilePlace, Row, Rows
from titanlite.utils import counted

#: Neighbouring tokens of a corpus: the first and the end of them.
Range = tuple[int, int]


class Window(NamedTuple):
    """Tokens of a row, and where there is one the target of the last of them."""

    ids: NDArray[Any]
    #: Where the loss counts a token; None: everywhere.
    targets: NDArray[np.bool_] | None = None
    #: Where documents begin.
    begins: Sequence[int] | NDArray[np.int64] = (0,)


def make_row(windows: Iterable[Window], seq_len: int, pad_id: int, mask_documents: bool) -> Row:
    """Return a row of windows side by side, filled up with padding.

    A token predicts the next one of its window; with `mask_documents` only the next one of its
    document.
    """
    tokens = np.full(seq_len, pad_id, dtype=np.int64)
    labels = np.full(seq_len, IGNORE, dtype=np.int64)
    # 1 where a document begins, with a place behind the row.
    begins = np.zeros(seq_len + 1, dtype=np.int32)
    at = 0
    for ids, targets, starts in windows:
        tokens[at : at + len(ids)] = ids[: seq_len - at]
        following = labels[at : at + len(ids) - 1]
        following[:] = ids[1:]
        if targets is not None:
            following[~targets[1:]] = IGNORE
        begins[np.asarray(starts) + at] = 1
        at += len(ids)
    if not mask_documents:
        return Row(tokens, labels)
    begins[0] = 0
    # Padding counts as one more document.
    begins[at : at + 1] = at > 0
    documents = np.cumsum(begins, dtype=np.int32)
    labels[documents[1:] != documents[:-1]] = IGNORE
    return Row(tokens, labels, documents[:-1])


class PackedDataset(Rows):
    """Sequences of one corpus by global index; they are a function of their number alone.

    Args:
        corpus: the tokenized documents.
        seq_len: tokens per sequence.
        seed: with the epoch, decides the order of documents and windows.
        shuffle: a new order each epoch; False: file order in all of them.
        epochs: passes over the corpus, or None for no end.
        mask_documents: rows tell which tokens are of one document.
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
        self._epoch = lru_cache(maxsize=3)(self._find_epoch)
        self._order = lru_cache(maxsize=2)(self._find_order)

    @property
    def documents(self) -> int:
        return self.corpus.documents

    @property
    def tokens_per_epoch(self) -> int:
        """Tokens of one pass, BOS and EOS included."""
        return self.corpus.size

    def describe(self) -> str:
        """Return the size of the text in words."""
        return self.corpus.describe()

    @property
    def sequences_per_epoch(self) -> int:
        """Sequences of one pass, the last one shared with the next pass."""
        return -(-self.tokens_per_epoch // self.seq_len)

    @property
    def total_sequences(self) -> int | None:
        """Sequences of all epochs, or None without an end.

        In a mixed order a few of them lie past the end of the text and hold no target. So the order
        does not depend on the number of epochs, and a run can be extended by more epochs.
        """
        if self.epochs is None:
            return None
        if self.shuffle:
            return self.epochs * self.sequences_per_epoch
        return -(-(self.epochs * self.tokens_per_epoch - 1) // self.seq_len)

    @property
    def fingerprint(self) -> str:
        """Hex digest of texts, tokenizer and packing, without `settings`."""
        return self.corpus.fingerprint

    @property
    def settings(self) -> dict[str, Any]:
        """The settings that decide sequence i, besides the fingerprint."""
        settings: dict[str, Any] = {
            "seq_len": self.seq_len,
            "seed": self.seed,
            "shuffle": self.shuffle,
            "epochs": self.epochs,
        }
        if self.mask_documents:
            settings["mask_documents"] = True
        if self.uses_documents and self.corpus.cut:
            settings["documents"] = self.corpus.cut
        return settings

    @property
    def uses_documents(self) -> bool:
        """Whether rows depend on where documents begin."""
        return self.mask_documents

    def sequence(self, index: int) -> Row:
        """Return sequence `index`.

        After the last target of the last epoch labels are `IGNORE`. Raises EndOfData for an index
        at or above `total_sequences`, and DataError for an impossible id in a token file.
        """
        if index < 0:
            raise IndexError(f"sequence {index}: indexes start at 0")
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

    def prepare(self, indexes: Sequence[int]) -> None:
        # Neighbours in file order are read ahead together.
        if not self.corpus.is_remote or not self.shuffle:
            return
        ranges: list[Range] = []
        for index in indexes:
            ranges += itertools.chain.from_iterable(self.ranges(self.window(index)))
        self.corpus.prepare(ranges)

    def padding(self) -> Row:
        """Return a sequence without targets, to fill up the last batch of finite data."""
        return make_row((), self.seq_len, self.corpus.pad_id, self.mask_documents)

    def _read(self, ranges: Sequence[Range]) -> Window:
        corpus = self.corpus
        pieces = [corpus.read(*one) for one in ranges]
        ids = pieces[0] if len(pieces) == 1 else np.concatenate(pieces)
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

    def window(self, index: int) -> int:
        """Return the window of sequence `index`."""
        if not self.shuffle:
            return index
        block, place = divmod(index, self.sequences_per_epoch)
        return block * self.sequences_per_epoch + self._order(block)(place)

    def _find_order(self, block: int) -> Callable[[int], int]:
        """Return the function from a place in a pass to its window."""
        if self.corpus.keeps_order:
            return Permutation(self.sequences_per_epoch, epoch_key(self.seed, block))
        # Another seed than for the order of documents, so that the two are not the same
        # permutation.
        return epoch_order(self.sequences_per_epoch, ~self.seed, block).item

    def documents_in(self, index: int) -> list[tuple[int, int]]:
        """Return the documents of sequence `index`, see `Rows`: numbers of records, from 0 in the
        files' order.
        """
        found: list[tuple[int, int]] = []
        for begin, end in itertools.chain.from_iterable(self.ranges(self.window(index))):
            documents = self.corpus.documents_in(begin, end)
            numbers = documents[:, 0]
            lengths = np.diff(documents[:, 1], append=end)
            found += zip(numbers.tolist(), lengths.tolist(), strict=True)
        return found

    def place_of(self, document: int) -> FilePlace | None:
        return self.corpus.place_of(document)

    def ranges(self, window: int) -> list[list[Range]]:
        """Return the parts of the corpus that make a row: those of each of its windows.

        Without a target: none.

        Here it is one window: seq_len + 1 tokens from token window * seq_len. Epochs are laid end
        to end; the last window has fewer tokens.
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
        """Return the parts of the corpus that an epoch has at [begin, begin + length)."""
        if not self.shuffle or self.corpus.keeps_order:
            return [(begin, begin + length)]
        order, starts = self._epoch(epoch)
        place = int(np.searchsorted(starts, begin, side="right")) - 1
        found: list[Range] = []
        while length > 0:
            document = order[place]
            first, end = self.corpus.offsets[document : document + 2].tolist()
            first += begin - int(starts[place])
            end = min(first + length, end)
            found.append((first, end))
            length -= end - first
            begin += end - first
            place += 1
        return found

    def _find_epoch(self, epoch: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return (documents in order [n], stream position within the epoch at which each begins
        [n]).
        """
        order = epoch_order(self.documents, self.seed, epoch)
        lengths = np.diff(self.corpus.offsets)[order]
        return order, np.cumsum(lengths) - lengths
