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
from titanlite.data.best_fit import BestFitDataset
from titanlite.data.corpus import PACKING, Corpus, encode_record, tokenize
from titanlite.data.formats import Format
from titanlite.data.mixture import MixedRows
from titanlite.data.packing import PackedDataset
from titanlite.data.rows import Rows
from titanlite.data.shards import Shards, hub_files, url_files
from titanlite.data.sources import columns_of, own_records, source_files
from titanlite.data.stream import StreamRows
from titanlite.data.token_cache import load_corpus, workers_of
from titanlite.data.token_files import TokenFiles, is_tokens, open_tokens
from titanlite.data.tokenizer import Tokenizer
from titanlite.utils import counted, human_bytes, is_dotted, logger

#: data.streaming = "auto" reads local text of more bytes while training.
_STREAMED_BYTES = 4 << 30
#: Of streamed validation text: the same for all numbers of ranks, so that they see the same sequences.
_HELD_OUT_LANES = 8

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
) -> dict[str, Rows]:
    """Build one pass over each held-out text, see `TextReader.held_out`. data: for its threads and its cache."""
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
                rows.given_lanes = data.lanes
            opened[name] = rows
        slots = lanes if any(isinstance(rows, StreamRows) for rows in opened.values()) else 1
        weights = {name: source.weight for name, source in zip(names, data.source, strict=True)}
        return MixedRows(opened, {0: weights, **(phases or {})}, seed=data.seed, slots=slots or 1)

    def held_out(self, validation: Validation, seq_len: int) -> dict[str, Rows]:
        """Return one pass over each held-out text, in file order, by its name; "" is that of a single text."""
        single = DataSource(name=validation.dataset, path=validation.dataset_path)
        return {
            name: self.open(source, key, seq_len, 1, shuffle=False, lanes=_HELD_OUT_LANES)
            for name, source, key in (
                [(s.name or "", s, f"validation.sources[{n}]") for n, s in enumerate(validation.sources)]
                or [("", single, "validation")]
            )
        }

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
            records = own_records(name, f"{key}.dataset", columns_of(data, name, None, source))
            corpus = tokenize((), self.tokenizer, self.vocab_size, workers, records)
            return self._pack(corpus, key, seq_len=seq_len, seed=seed, shuffle=shuffle, epochs=epochs)
        if source.format == "tokens" or is_tokens(source.path):
            fields = {
                field: getattr(source, field) or getattr(data, field)
                for field in ("text_key", "prompt_key", "completion_key")
            }
            files = open_tokens(str(source.path), self.tokenizer, self.vocab_size, f"{key}.dataset_path", fields)
            return self._pack(files, key, seq_len=seq_len, seed=seed, shuffle=shuffle, epochs=epochs)
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
                best_fit=data.packing == "best-fit" and not key.startswith("validation"),
            )
        corpus = self._corpus(shards)
        return self._pack(corpus, key, seq_len=seq_len, seed=seed, shuffle=shuffle, epochs=epochs)

    def _pack(self, corpus: Corpus | TokenFiles, key: str, **order: Any) -> PackedDataset:
        """Return the sequences of a corpus. Held-out text is always split: its targets are the same in every run."""
        best_fit = self.data.packing == "best-fit" and not key.startswith("validation")
        kind = BestFitDataset if best_fit else PackedDataset
        return kind(corpus, mask_documents=self.data.mask_documents, **order)

    def _shards(self, source: DataSource, key: str) -> Shards:
        """List the files of a source."""
        name, data = source.name or "", self.data
        text = hub_text(name) if source.path is None else None
        columns = columns_of(data, name, source.path, source)
        kind: Format = "auto" if source.format == "tokens" else source.format
        revision, names = "", list[str]()
        if text is not None:
            split = source.split or (text.held_out if key.startswith("validation") else None)
            names, revision, found = hub_files(text, source.subset, split, f"{key}.dataset")
            kind = found if kind == "auto" else kind
        elif source.path is not None and is_url(source.path):
            names = url_files(source.path, f"{key}.dataset_path")
        else:
            names = [str(file) for file in source_files(name, source.path, key)]
        if text is not None or is_url(names[0]):
            at = f" at revision {revision}" if revision else ""
            logger.info(
                f"{name or source.path}: {counted(len(names), 'files')}{at}, the first is {names[0].partition('?')[0]}"
            )
        return Shards(tuple(names), columns, kind, revision, self.patience, f"{key}.dataset_path")

    def _is_stream(self, shards: Shards, source: DataSource) -> bool:
        if self.data.streaming != "auto":
            return self.data.streaming and not (source.path is None and hub_text(source.name or "") is None)
        if is_url(shards.names[0]):
            return True
        try:
            size = sum(Path(name).stat().st_size for name in shards.names)
        except OSError as error:
            raise DataError(f"{shards.key}: {error.filename} cannot be read here: {error.strerror}") from error
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
        reading = {"columns": shards.columns, "kind": shards.kind}
        keep: Any = {"workers": data.num_workers, "cache": data.token_cache, **reading}
        return load_corpus(files, self.tokenizer, self.vocab_size, **keep)
