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

import hashlib
import logging
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from titanlite.config.plans import DataPlan, ValidationPlan
from titanlite.data.errors import DataError, EndOfData
from titanlite.data.order import epoch_order
from titanlite.data.sources import Record, iter_records, source_files
from titanlite.data.tokenizer import Tokenizer

logger = logging.getLogger("titanlite")
#: Seconds between two lines about how far the reading is.
_SAY_EVERY = 5.0

#: Label of a position that is no target.
IGNORE = -100

#: Part of the fingerprint; to be changed with anything that changes the token stream.
_PACKING = "BOS + ids + EOS per document, split at seq_len, no document mask, order 2"


@dataclass(frozen=True)
class Corpus:
    """Tokenized documents, end to end.

    `tokens`: [all tokens] uint16 (uint32 for vocabularies over 65,536), each document with BOS and EOS;
    `offsets`: [documents + 1] int64, document d is tokens[offsets[d] : offsets[d + 1]];
    `fingerprint`: hex sha256 of the texts in file order, the tokenizer and the way of packing.
    """

    tokens: NDArray[np.unsignedinteger]
    offsets: NDArray[np.int64]
    pad_id: int
    fingerprint: str
    files: tuple[Path, ...]


def tokenize(files: list[Path], tokenizer: Tokenizer, vocab_size: int) -> Corpus:
    """Read and tokenize whole files. About 20 MB of text per second.

    Raises DataError for a damaged source, and for a token id at or over `vocab_size` (the model's), naming
    file, line and id.
    """
    dtype = np.uint16 if vocab_size <= 1 << 16 else np.uint32
    parts: list[NDArray[np.unsignedinteger]] = []
    read = 0
    said = time.monotonic()
    digest = hashlib.sha256(f"{_PACKING}\n{tokenizer.fingerprint}\n".encode())
    for record in iter_records(files):
        content = record.text.encode("utf-8", errors="surrogatepass")
        digest.update(b"%d " % len(content))
        digest.update(content)
        ids = np.array(tokenizer.encode(record.text, bos=True, eos=True), dtype=np.int64)
        if ids.max() >= vocab_size:
            raise _over_vocabulary(record, int(ids[ids >= vocab_size][0]), vocab_size, tokenizer)
        parts.append(ids.astype(dtype))
        read += len(content)
        if time.monotonic() - said > _SAY_EVERY:
            said = time.monotonic()
            logger.info(
                f"reading text: {len(parts):,} documents, {read / 1e6:,.0f} MB so far; now in {record.file}, "
                f"file {files.index(record.file) + 1} of {len(files)}"
            )
    lengths = np.array([len(part) for part in parts], dtype=np.int64)
    return Corpus(
        tokens=np.concatenate(parts),
        offsets=np.concatenate([[0], np.cumsum(lengths)]),
        pad_id=tokenizer.eos_id,
        fingerprint=digest.hexdigest(),
        files=tuple(files),
    )


def _over_vocabulary(record: Record, token_id: int, vocab_size: int, tokenizer: Tokenizer) -> DataError:
    return DataError(
        f"{record.file}, line {record.number}: token id {token_id} is outside the model's vocabulary of {vocab_size} "
        f"(the tokenizer has {tokenizer.vocab_size}); set model.vocab_size to at least {tokenizer.vocab_size}, "
        "or give the model's own tokenizer by model.tokenizer_path"
    )


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
            raise EndOfData(f"sequence {index}: {self.epochs} epoch(s) of this text hold {total} sequences")
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
        if block not in self._windows:
            if len(self._windows) == 2:
                del self._windows[next(iter(self._windows))]
            # Another seed than the documents' order has, so that the two are not the same permutation.
            self._windows[block] = epoch_order(size, ~self.seed, block)
        return block * size + int(self._windows[block][place])

    def _stream(self, start: int, length: int) -> NDArray[np.unsignedinteger]:
        """Tokens [start, start + length) of all epochs end to end; fewer at the end of finite data."""
        parts = []
        epoch, within = divmod(start, self.tokens_per_epoch)
        while length > 0 and (self.epochs is None or epoch < self.epochs):
            order, starts = self._epoch(epoch)
            place = int(np.searchsorted(starts, within, side="right")) - 1
            while length > 0 and place < len(order):
                document = order[place]
                begin = int(self.corpus.offsets[document]) + within - int(starts[place])
                part = self.corpus.tokens[begin : min(begin + length, int(self.corpus.offsets[document + 1]))]
                parts.append(part)
                length -= len(part)
                within += len(part)
                place += 1
            epoch, within = epoch + 1, 0
        return np.concatenate(parts)

    def _epoch(self, epoch: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """(documents in order [n], stream position within the epoch at which each begins [n])."""
        if epoch not in self._orders:
            if len(self._orders) == 3:  # a block of windows touches two epochs, or three after many passes
                del self._orders[min(self._orders)]
            order = epoch_order(self.documents, self.seed, epoch, self.shuffle)
            lengths = np.diff(self.corpus.offsets)[order]
            self._orders[epoch] = order, np.cumsum(lengths) - lengths
        return self._orders[epoch]


def build_dataset(plan: DataPlan, tokenizer: Tokenizer, vocab_size: int) -> PackedDataset:
    """The training sequences of `plan`. Raises DataError as `source_files`, `iter_records` and `tokenize` do."""
    corpus = tokenize(source_files(plan.dataset, plan.path), tokenizer, vocab_size)
    return PackedDataset(corpus, seq_len=plan.seq_len, seed=plan.seed, shuffle=plan.shuffle, epochs=plan.epochs)


def build_validation_dataset(plan: ValidationPlan, tokenizer: Tokenizer, vocab_size: int) -> PackedDataset:
    """One pass over the held-out text of `plan`, in file order."""
    corpus = tokenize(source_files(plan.dataset, plan.path, "validation"), tokenizer, vocab_size)
    return PackedDataset(corpus, seq_len=plan.seq_len, shuffle=False, epochs=1)
