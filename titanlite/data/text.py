"""From the keys about text to training sequences: which reader, whole or as a stream, one source or a mixture."""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from titanlite.config.sections import Data, DataSource, Training, Validation
from titanlite.config.text_names import hub_text
from titanlite.config.urls import is_url
from titanlite.data import DataError
from titanlite.data.corpus import PACKING, Corpus, encode_record, tokenize
from titanlite.data.formats import Columns, Format
from titanlite.data.mixture import MixedRows
from titanlite.data.packing import PackedDataset
from titanlite.data.rows import Rows
from titanlite.data.shards import Shards, hub_files, url_files
from titanlite.data.sources import own_records, source_files
from titanlite.data.stream import StreamRows
from titanlite.data.token_cache import load_corpus, workers_of
from titanlite.data.tokenizer import Tokenizer
from titanlite.utils import counted, human_bytes, is_dotted, logger

#: data.streaming = "auto" reads local text of more bytes while training.
_STREAMED_BYTES = 4 << 30

#: Returns on all ranks what a function returns on rank 0; the name tells several calls apart.
Share = Callable[[str, Callable[[], Any]], Any]


def alone(_: str, make: Callable[[], Any]) -> Any:
    """Share with nobody."""
    return make()


def build_dataset(training: Training, data: Data, tokenizer: Tokenizer, vocab_size: int) -> Rows:
    """Build the training sequences of these sections. Raises DataError for text that is missing or damaged."""
    return TextReader(data, tokenizer, vocab_size).train(training)


def build_validation_dataset(
    validation: Validation, data: Data, tokenizer: Tokenizer, vocab_size: int, seq_len: int
) -> Rows:
    """Build one pass over the held-out text, in file order. data: for its threads and its cache."""
    return TextReader(data, tokenizer, vocab_size).held_out(validation, seq_len)


@dataclass(frozen=True)
class TextReader:
    """Opens the text of a run.

    vocab_size: the model's. ranks: data-parallel degree. share: returns on all ranks what a function returns on rank 0,
    under a name; files are listed once. patience: seconds for a remote source to come back.
    """

    data: Data
    tokenizer: Tokenizer
    vocab_size: int
    ranks: int = 1
    share: Share = alone
    patience: float = 0.0

    def train(self, training: Training, phases: Mapping[int, Mapping[str, float]] | None = None) -> Rows:
        """Return the training sequences. Raises DataError for text that is missing or cannot be read.

        phases: first sequence → shares of the sources from there on, by name.
        """
        data = self.data
        if not data.source:
            source = DataSource(name=training.dataset, path=training.dataset_path, subset=data.subset, split=data.split)
            return self.open(source, "training", training.seq_len, training.epochs)
        names = [source.name or source.path or "" for source in data.source]
        opened: dict[str, Rows] = {}
        lanes = data.lanes
        for number, (name, source) in enumerate(zip(names, data.source, strict=True)):
            key = f"data.source[{number}]"
            seed = data.seed ^ zlib.crc32(name.encode())  # the order of a source is its own, whatever else is mixed
            rows = self.open(source, key, training.seq_len, source.epochs, seed=seed, lanes=lanes)
            if isinstance(rows, StreamRows):
                lanes = rows.lanes  # the same for all streams of the mixture
            opened[name] = rows
        slots = lanes if any(isinstance(rows, StreamRows) for rows in opened.values()) else 1
        weights = {name: source.weight for name, source in zip(names, data.source, strict=True)}
        return MixedRows(opened, {0: weights, **(phases or {})}, seed=data.seed, slots=slots or 1)

    def held_out(self, validation: Validation, seq_len: int) -> Rows:
        """Return one pass over the held-out text, in file order."""
        source = DataSource(name=validation.dataset, path=validation.dataset_path)
        return self.open(source, "validation", seq_len, 1, shuffle=False)

    def open(
        self,
        source: DataSource,
        key: str,
        seq_len: int,
        epochs: int | None,
        *,
        seed: int | None = None,
        shuffle: bool | None = None,
        lanes: int | None = None,
    ) -> Rows:
        """Return the sequences of one source. key: of the config, for errors."""
        data, name = self.data, source.name or ""
        seed = data.seed if seed is None else seed
        shuffle = data.shuffle if shuffle is None else shuffle
        if source.path is None and is_dotted(name):
            # Its code says nothing of its text, so its tokens are not cached.
            workers = data.num_workers or 0
            corpus = tokenize((), self.tokenizer, self.vocab_size, workers, own_records(name, f"{key}.dataset"))
            return PackedDataset(corpus, seq_len=seq_len, seed=seed, shuffle=shuffle, epochs=epochs)
        shards = self.share(f"files of {key}", lambda: self._shards(source, key))
        if self._is_stream(shards, source):
            if epochs is not None and shuffle:
                end = f"{key}.epochs: {name or source.path} is read as a stream, whose length is not known"
                raise DataError(f"{end}; give training.steps or training.tokens, or data.streaming = false")
            return StreamRows(
                shards,
                lambda record: encode_record(record, self.tokenizer, self.vocab_size),
                description=f"{PACKING}, {self.tokenizer.fingerprint}",
                seq_len=seq_len,
                pad_id=self.tokenizer.eos_id,
                seed=seed,
                shuffle=shuffle,
                buffer=data.shuffle_buffer,
                lanes=lanes or data.lanes,
                ranks=self.ranks,
                workers=workers_of(data.num_workers),
                mask_documents=data.mask_documents,
            )
        corpus = self._corpus(shards)
        return PackedDataset(corpus, seq_len=seq_len, seed=seed, shuffle=shuffle, epochs=epochs)

    def _shards(self, source: DataSource, key: str) -> Shards:
        """List the files of a source."""
        name, data = source.name or "", self.data
        text = hub_text(name) if source.path is None else None
        column = source.completion_key or data.completion_key or source.text_key or data.text_key
        columns = Columns(column or (text.text_key if text else "text"), source.prompt_key or data.prompt_key)
        kind: Format = "auto" if source.format == "tokens" else source.format
        revision, names = "", list[str]()
        if text is not None:
            names, revision, found = hub_files(text, source.subset, source.split, f"{key}.dataset")
            kind = found if kind == "auto" else kind
        elif source.path is not None and is_url(source.path):
            names = url_files(source.path, f"{key}.dataset_path")
        else:
            names = [str(file) for file in source_files(name, source.path, key)]
        if text is not None or is_url(names[0]):
            at = f" at revision {revision}" if revision else ""
            logger.info(f"{name or source.path}: {counted(len(names), 'files')}{at}, the first is {names[0]}")
        return Shards(tuple(names), columns, kind, revision, self.patience, f"{key}.dataset_path")

    def _is_stream(self, shards: Shards, source: DataSource) -> bool:
        if self.data.streaming != "auto":
            return self.data.streaming and not (source.path is None and hub_text(source.name or "") is None)
        if is_url(shards.names[0]):
            return True
        size = sum(Path(name).stat().st_size for name in shards.names)
        if size > _STREAMED_BYTES:
            logger.info(f"{human_bytes(size)} of text are read while training (data.streaming)")
        return size > _STREAMED_BYTES

    def _corpus(self, shards: Shards) -> Corpus:
        """Tokenize all text of a source, or map what an earlier run has kept."""
        data = self.data
        if is_url(shards.names[0]):
            rows = (shards.records(number, 0) for number in range(len(shards.names)))
            records = itertools.chain.from_iterable(rows)
            return tokenize((), self.tokenizer, self.vocab_size, workers_of(data.num_workers), records)
        files = [Path(name) for name in shards.names]
        return load_corpus(files, self.tokenizer, self.vocab_size, workers=data.num_workers, cache=data.token_cache)
