"""From the keys about text to training sequences: which reader, whole or as a stream, one source or
a mixture.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from msgspec.structs import replace as replace_fields

from titanlite.config.checks import is_there
from titanlite.config.data_sections import Data, DataSource, Validation
from titanlite.config.dataset_registry import hub_text
from titanlite.config.errors import refuse
from titanlite.config.sections import Training
from titanlite.config.urls import is_url
from titanlite.data import DataError
from titanlite.data.dataset_sources import (
    held_out_texts,
    is_of_hub,
    is_stream,
    key_of,
    stream_problems,
    training_texts,
)
from titanlite.data.file_kinds import Format
from titanlite.data.file_stamps import FileStamps, local_stamps
from titanlite.data.rows import Rows
from titanlite.data.sequences import PackedDataset
from titanlite.data.text_files import (
    BUNDLED,
    TextFiles,
    columns_of,
    find_text,
    iter_records,
)
from titanlite.data.token_cache import load_corpus
from titanlite.data.token_paths import is_of_tokens
from titanlite.data.tokenize_files import Corpus, Tokens, encode, tokenize, workers_of
from titanlite.data.tokenizer import Tokenizer
from titanlite.utils import human_bytes, is_dotted, logger

if TYPE_CHECKING:
    from titanlite.data.listing import Listing

#: data.streaming = "auto" reads local text of more bytes while training.
_STREAMED_BYTES = 4 << 30
#: Lanes of streamed validation text: the same for all numbers of ranks, so that they see the same
#: sequences.
_HELD_OUT_LANES = 8

#: Returns on all ranks what a function returns on rank 0; the name tells several calls apart.
Share = Callable[[str, Callable[[], Any]], Any]


def alone(_: str, make: Callable[[], Any]) -> Any:
    """Return what `make` returns, without sharing it with other ranks."""
    return make()


class Order(NamedTuple):
    """Settings that decide the rows of a dataset besides its tokens."""

    seq_len: int
    seed: int
    shuffle: bool
    mask_documents: bool


@dataclass(frozen=True)
class TextReader:
    """Opens the text of a run.

    `vocab_size` is the model's, `ranks` the data-parallel degree. `share` returns rank 0's result
    on all ranks. A remote source has `patience` seconds to come back.
    """

    data: Data
    tokenizer: Tokenizer
    vocab_size: int
    ranks: int = 1
    share: Share = alone
    patience: float = 0.0
    #: Lanes of an earlier stream of the same mixture.
    lanes: int | None = None

    def train(
        self, training: Training, phases: Mapping[int, Mapping[str, float]] | None = None
    ) -> Rows:
        """Return the training sequences; `phases` has shares by first sequence.

        Raises DataError for text that is missing or cannot be read.
        """
        texts = training_texts(training, self.data)
        if self.data.source:
            from titanlite.data.mixtures.mixed_rows import open_mixture

            return open_mixture(self, texts, training.seq_len, phases or {})
        [(section, source)] = texts.items()
        return self.open(source, section, training.seq_len, source.epochs)

    def held_out(self, validation: Validation, seq_len: int) -> dict[str, Rows]:
        """Return one pass over each held-out text, in file order, by its name; "" for a single
        text.

        Rows are always split, and a stream has the same lanes, so targets are the same in every
        run.
        """
        settings = replace_fields(self.data, shuffle=False, packing="split", lanes=_HELD_OUT_LANES)
        reader = replace(self, data=settings)
        found: dict[str, Rows] = {}
        for section, source in held_out_texts(validation).items():
            name = source.title if validation.sources else ""
            text = hub_text(source.name or "")
            if source.path is None and not source.split and text is not None:
                source = replace_fields(source, split=text.held_out)
            found[name] = reader.open(source, section, seq_len, epochs=1)
        return found

    def open(self, source: DataSource, section: str, seq_len: int, epochs: int | None) -> Rows:
        data = self.data
        order = Order(seq_len, data.seed, data.shuffle, data.mask_documents)
        if source.path is None and is_dotted(source.name or ""):
            from titanlite.data.text_function import own_corpus

            return self._packed(own_corpus(self, source, section), order, epochs)
        if is_of_tokens(source):
            from titanlite.data.token_files import open_source

            tokens = open_source(self, source, section)
            rows = self._packed(tokens, order, epochs, tokens.listing)
            if tokens.index is None:
                names = tokens.listing.files
                stamps = self.share(f"stamps of {section}", lambda: local_stamps(names))
                rows.stamps = FileStamps(names, stamps)
            return rows
        self._refuse_type(source, section)
        files = self.share(f"files of {section}", lambda: self.files_of(source, section))
        if self._is_stream(files, source):
            from titanlite.data.stream import open_stream

            refuse([*stream_problems(self.data, source, section)])
            return open_stream(self, files, order)
        return self._packed(self._corpus(files), order, epochs, files.listing)

    def look(self, source: DataSource, section: str, records: int) -> None:
        """Encode the first records of a local text. Raises DataError as `open`."""
        path = source.path
        if path is None and source.name not in BUNDLED:
            return
        if path is not None and (is_url(path) or not is_there(path)):
            return
        if is_of_tokens(source):
            from titanlite.data.token_files import open_source

            open_source(self, source, section)
            return
        self._refuse_type(source, section)
        files = self.files_of(source, section)
        found = iter_records([Path(name) for name in files.names], files.columns, files.kind)
        for _ in encode(islice(found, records), self.tokenizer, self.vocab_size, workers=0):
            pass

    def _refuse_type(self, source: DataSource, section: str) -> None:
        key = ""
        if source.token_dtype is not None:
            key = f"{section}.token_dtype"
        elif section == "training" and self.data.token_dtype != "auto":
            key = "data.token_dtype"
        if key:
            raise DataError(
                f"{key}: {source.path or source.name} is text, not token files. Leave the key out, "
                'or set format = "tokens" for files with other names'
            )

    def _packed(
        self, corpus: Tokens, order: Order, epochs: int | None, listing: Listing | None = None
    ) -> Rows:
        rows: Rows
        if self.data.packing == "best-fit":
            from titanlite.data.best_fit import BestFitDataset

            rows = BestFitDataset(corpus, epochs=epochs, **order._asdict())
        else:
            rows = PackedDataset(corpus, epochs=epochs, **order._asdict())
        rows.listing = listing
        return rows

    def files_of(self, source: DataSource, section: str) -> TextFiles:
        name = source.name or ""
        columns = columns_of(self.data, name, source.path, source, self.tokenizer)
        kind: Format = "auto" if source.format == "tokens" else source.format
        if is_of_hub(source) or is_url(source.path or ""):
            from titanlite.data.stream_files import remote_files

            return remote_files(source, columns, kind, section, self.patience)
        key = key_of(section, "path")
        listing = find_text(name, source.path, key, source.split, kind)
        is_bundled = source.path is None
        reported = None if is_bundled else listing
        stamps = local_stamps(listing.files)
        return TextFiles(
            listing.files,
            columns,
            kind,
            patience=self.patience,
            key=key,
            listing=reported,
            stamps=stamps,
        )

    def _is_stream(self, files: TextFiles, source: DataSource) -> bool:
        known = is_stream(source, self.data.streaming)
        if known is not None:
            return known
        try:
            size = sum(Path(name).stat().st_size for name in files.names)
        except OSError as error:
            raise DataError(
                f"{files.key}: {error.filename} cannot be read here: {error.strerror}"
            ) from error
        if size > _STREAMED_BYTES:
            logger.info(f"{human_bytes(size)} of text are read while training (data.streaming)")
        return size > _STREAMED_BYTES

    def _corpus(self, files: TextFiles) -> Corpus:
        if is_url(files.names[0]):
            workers = workers_of(self.data.num_workers)
            return tokenize((), self.tokenizer, self.vocab_size, workers, files.all_records())
        return load_corpus(
            [Path(name) for name in files.names],
            self.tokenizer,
            self.vocab_size,
            workers=self.data.num_workers,
            cache=self.data.token_cache,
            columns=files.columns,
            kind=files.kind,
        )
