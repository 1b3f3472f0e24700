"""From the keys about text to training sequences: which reader, whole or as a stream, one source or
a mixture.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, cast

from msgspec.structs import replace as replace_fields

from titanlite.config.data_sections import Data, DataSource, Validation
from titanlite.config.sections import Training
from titanlite.config.text_names import hub_text
from titanlite.config.urls import is_url
from titanlite.data import DataError
from titanlite.data.best_fit import BestFitDataset
from titanlite.data.chat import load_template
from titanlite.data.corpus import PACKING, Corpus, encode_record, tokenize
from titanlite.data.kinds import Format
from titanlite.data.listing import Place, listing_of
from titanlite.data.mixture import MixedRows
from titanlite.data.packing import PackedDataset
from titanlite.data.remote import public_name
from titanlite.data.rows import Rows
from titanlite.data.shards import Shards, hub_files, url_text
from titanlite.data.sources import all_of, columns_of, find_text, own_records
from titanlite.data.stream import StreamRows
from titanlite.data.token_cache import load_corpus, records_folder, workers_of
from titanlite.data.token_files import TokenFiles, open_tokens
from titanlite.data.token_paths import is_tokens
from titanlite.data.tokenizer import Tokenizer
from titanlite.utils import counted, human_bytes, is_dotted, logger

#: data.streaming = "auto" reads local text of more bytes while training.
_STREAMED_BYTES = 4 << 30
#: Of streamed validation text: the same for all numbers of ranks, so that they see the same
#: sequences.
_HELD_OUT_LANES = 8

#: Returns on all ranks what a function returns on rank 0; the name tells several calls apart.
Share = Callable[[str, Callable[[], Any]], Any]


def alone(_: str, make: Callable[[], Any]) -> Any:
    """Share with nobody."""
    return make()


def _key(section: str, field: Literal["name", "path"] = "name") -> str:
    """Return the key of a text's name or path: of `data.source[0]`, or of `training` and
    `validation`.
    """
    in_training = {"name": "dataset", "path": "dataset_path"}
    return f"{section}.{field if section.endswith(']') else in_training[field]}"


def build_dataset(training: Training, data: Data, tokenizer: Tokenizer, vocab_size: int) -> Rows:
    """Build the training sequences of these sections.

    Raises DataError for text that is missing or damaged.
    """
    return TextReader(data, tokenizer, vocab_size).train(training)


@dataclass(frozen=True)
class TextReader:
    """Opens the text of a run.

    vocab_size: the model's. ranks: data-parallel degree. share: returns on all ranks what a
    function returns on rank 0, under a name; files are listed once. patience: seconds for a remote
    source to come back.
    """

    data: Data
    tokenizer: Tokenizer
    vocab_size: int
    ranks: int = 1
    share: Share = alone
    patience: float = 0.0

    def train(
        self, training: Training, phases: Mapping[int, Mapping[str, float]] | None = None
    ) -> Rows:
        """Return the training sequences.

        Raises DataError for text that is missing or cannot be read.

        phases: first sequence → shares of the sources from there on, by name.
        """
        data = self.data
        if not data.source:
            source = DataSource(
                name=training.dataset,
                path=training.dataset_path,
                subset=data.subset,
                split=data.split,
            )
            return self._open_with_end(source, "training", training.seq_len, training.epochs)
        opened: dict[str, Rows] = {}
        weights: dict[str, float] = {}
        lanes = data.lanes
        for number, source in enumerate(data.source):
            name = source.name or source.path or ""
            # The order of a source is its own, whatever else is mixed. All streams of a mixture
            # have the same lanes.
            settings = replace_fields(data, seed=data.seed ^ zlib.crc32(name.encode()), lanes=lanes)
            reader = replace(self, data=settings)
            rows = reader._open_with_end(
                source, f"data.source[{number}]", training.seq_len, source.epochs
            )
            if isinstance(rows, StreamRows):
                lanes, rows.given_lanes = rows.lanes, data.lanes
            opened[name], weights[name] = rows, source.weight
        slots = lanes if any(isinstance(rows, StreamRows) for rows in opened.values()) else 1
        return MixedRows(opened, {0: weights, **(phases or {})}, seed=data.seed, slots=slots or 1)

    def held_out(self, validation: Validation, seq_len: int) -> dict[str, Rows]:
        """Return one pass over each held-out text, in file order, by its name; "" is that of a
        single text.

        It is always split, and a stream has the same lanes: so the targets are the same in every
        run.
        """
        settings = replace_fields(self.data, shuffle=False, packing="split", lanes=_HELD_OUT_LANES)
        reader, found = replace(self, data=settings), dict[str, Rows]()
        single = DataSource(
            name=validation.dataset, path=validation.dataset_path, split=validation.split
        )
        for number, source in enumerate(validation.sources or [single]):
            text = hub_text(source.name or "") if source.path is None else None
            own = replace_fields(source, split=source.split or (text.held_out if text else None))
            key = f"validation.sources[{number}]" if validation.sources else "validation"
            found[source.name or "" if validation.sources else ""] = reader.open(
                own, key, seq_len, 1
            )
        return found

    def _open_with_end(
        self, source: DataSource, key: str, seq_len: int, epochs: int | None
    ) -> Rows:
        rows = self.open(source, key, seq_len, epochs)
        if epochs is not None and rows.total_sequences is None:
            end = (
                f"{key}.epochs: {source.name or source.path} is read as a stream, whose length is "
                "not known"
            )
            raise DataError(
                f"{end}; give training.steps or training.tokens, or data.streaming = false"
            )
        return rows

    def open(self, source: DataSource, key: str, seq_len: int, epochs: int | None) -> Rows:
        """Return the sequences of one source. key: of the config, for errors."""
        data, name = self.data, source.name or ""
        order: dict[str, Any] = {"seq_len": seq_len, "seed": data.seed, "shuffle": data.shuffle}
        order["mask_documents"] = data.mask_documents
        pack: Any = BestFitDataset if data.packing == "best-fit" else PackedDataset
        if source.path is None and is_dotted(name):
            # Its code says nothing of its text, so its tokens are not cached.
            columns = columns_of(data, name, None, source, self.tokenizer)
            records = own_records(name, _key(key), columns)
            corpus = tokenize((), self.tokenizer, self.vocab_size, data.num_workers or 0, records)
            return cast(Rows, pack(corpus, epochs=epochs, **order))
        if source.format == "tokens" or source.format == "auto" and is_tokens(source.path):
            files = self._token_files(source, key)
            packed = pack(files, epochs=epochs, **order)
            packed.listing = files.listing
            return cast(Rows, packed)
        shards = self.share(f"files of {key}", lambda: self._shards(source, key))
        if not self._is_stream(shards, source):
            packed = pack(self._corpus(shards), epochs=epochs, **order)
            packed.listing = shards.listing
            return cast(Rows, packed)
        return StreamRows(
            shards,
            lambda record: encode_record(record, self.tokenizer, self.vocab_size),
            description=f"{PACKING}, {self.tokenizer.fingerprint}",
            pad_id=self.tokenizer.eos_id,
            buffer=data.shuffle_buffer,
            lanes=data.lanes,
            ranks=self.ranks,
            workers=workers_of(data.num_workers),
            best_fit=data.packing == "best-fit",
            **order,
        )

    def _token_files(self, source: DataSource, key: str) -> TokenFiles:
        """Open the token files of a source.

        Raises DataError for those prepared with other fields than are asked for
        """
        names = ("text_key", "prompt_key", "completion_key", "messages_key")
        fields = {name: getattr(source, name) or getattr(self.data, name) for name in names}
        records = records_folder(self.data.token_cache)
        files = open_tokens(
            str(source.path), self.tokenizer, self.vocab_size, _key(key, "path"), fields, records
        )
        if self.data.chat_template and fields["messages_key"] and files.index:
            template = load_template(self.data.chat_template, self.tokenizer)
            if files.index["options"]["chat"][0] != template.source:
                raise DataError(
                    f"data.chat_template: {source.path} is prepared with another one; leave the "
                    "key out"
                )
        return files

    def _shards(self, source: DataSource, key: str) -> Shards:
        """List the files of a source."""
        name = source.name or ""
        text = hub_text(name) if source.path is None else None
        columns = columns_of(self.data, name, source.path, source, self.tokenizer)
        kind: Format = "auto" if source.format == "tokens" else source.format
        path_key = _key(key, "path")
        revision = ""
        if text is not None:
            names, revision, found = hub_files(text, source.subset, source.split, _key(key))
            kind = found if kind == "auto" else kind
            listing = listing_of(names, source.split or text.split)
        elif source.path is not None and is_url(source.path):
            listing = url_text(Place(source.path, path_key, source.split, kind))
        else:
            listing = find_text(name, source.path, path_key, source.split, kind)
        names = list(listing.files)
        if text is not None or is_url(names[0]):
            at = f" at revision {revision}" if revision else ""
            text_name = public_name(name or str(source.path))
            logger.info(
                f"{text_name}: {counted(len(names), 'files')}{at}, the first is "
                f"{public_name(names[0])}"
            )
        bundled = source.path is None and text is None
        reported = None if bundled else listing
        return Shards(tuple(names), columns, kind, revision, self.patience, path_key, reported)

    def _is_stream(self, shards: Shards, source: DataSource) -> bool:
        if self.data.streaming != "auto":
            return self.data.streaming and not (
                source.path is None and hub_text(source.name or "") is None
            )
        if is_url(shards.names[0]):
            return True
        try:
            size = sum(Path(name).stat().st_size for name in shards.names)
        except OSError as error:
            raise DataError(
                f"{shards.key}: {error.filename} cannot be read here: {error.strerror}"
            ) from error
        if size > _STREAMED_BYTES:
            logger.info(f"{human_bytes(size)} of text are read while training (data.streaming)")
        return size > _STREAMED_BYTES

    def _corpus(self, shards: Shards) -> Corpus:
        """Tokenize all text of a source, or map what an earlier run has kept."""
        data = self.data
        if is_url(shards.names[0]):
            records = all_of(
                [shards.records(number, 0) for number in range(len(shards.names))], shards.names
            )
            return tokenize(
                (), self.tokenizer, self.vocab_size, workers_of(data.num_workers), records
            )
        files = [Path(name) for name in shards.names]
        reading = {"columns": shards.columns, "kind": shards.kind}
        keep: Any = {"workers": data.num_workers, "cache": data.token_cache, **reading}
        return load_corpus(files, self.tokenizer, self.vocab_size, **keep)
