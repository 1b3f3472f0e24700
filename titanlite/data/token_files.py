"""Tokens in files that are mapped into memory: prepared by `titanlite data prepare`
(`titanlite.data.prepared_tokens`), or by other programs (`titanlite.data.foreign`).

The memory of a rank does not grow with the corpus. Parts are mapped when they are first read; the
pages of a map belong to the system's page cache.
"""

from __future__ import annotations

import hashlib
import json
import os
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray

from titanlite.config.urls import is_url, public_name
from titanlite.data import DataError
from titanlite.data.dataset_sources import key_of
from titanlite.data.listing import Listing
from titanlite.data.mapped_tokens import ORDER, Part
from titanlite.data.rows import FilePlace
from titanlite.data.token_cache import records_folder
from titanlite.data.token_integrity import HashCheck
from titanlite.data.token_paths import INDEX, is_index
from titanlite.data.tokenizer import Tokenizer
from titanlite.utils import counted

if TYPE_CHECKING:
    from titanlite.config.data_sections import DataSource
    from titanlite.data.dataset_builder import TextReader

#: Pieces of foreign files that are read at the start, and tokens in each.
_PIECES = 256
_PIECE = 4096


class _Span(NamedTuple):
    number: int
    part: Part
    begin: int
    end: int


class TokenFiles:
    """A corpus of token files, read as one array.

    Args:
        vocab_size: of the model; no id may be as high.
        index: content of `index.json`; None: another program's files, sampled at the start.
        check: compares the hashes of the parts that are read, on the first rank of a machine.

    Raises DataError if there are no tokens. Reads raise it, naming file and place, for an id that
    is too high, or after a failed check of hashes.
    """

    keeps_order: ClassVar[bool] = True
    files: ClassVar[tuple[Path, ...]] = ()

    def __init__(
        self,
        path: str,
        parts: Sequence[Part],
        tokenizer: Tokenizer,
        vocab_size: int,
        index: Mapping[str, Any] | None = None,
        check: HashCheck | None = None,
    ) -> None:
        self.path = path
        self.parts = parts
        self.vocab_size = vocab_size
        self.index = index
        self.check = check
        self.pad_id = tokenizer.eos_id
        #: How another program's files were found, and how ids tell documents apart.
        self.found: Listing | None = None
        self.cut = ""
        #: Tokens of all parts up to each.
        self._ends = list(accumulate(part.size for part in parts))
        if not parts or not self.size:
            raise DataError(f"{public_name(path)} holds no tokens")

    @cached_property
    def fingerprint(self) -> str:
        """Hex digest of the folder's content, or of samples without an index."""
        return str(self.index["fingerprint"]) if self.index else self.sample()

    @property
    def listing(self) -> Listing:
        if self.found is not None:
            return self.found
        names = tuple(str(part.file) for part in self.parts)
        size = sum(part.size * part.dtype.itemsize for part in self.parts)
        return Listing(names, {"tokens": len(names)}, size, None, {}, {})

    @property
    def size(self) -> int:
        return self._ends[-1]

    @cached_property
    def _documents(self) -> list[int]:
        """Documents of all parts up to each. All are read if only ids tell them apart."""
        return list(accumulate(part.documents for part in self.parts))

    @property
    def documents(self) -> int:
        return self._documents[-1]

    @property
    def characters(self) -> None:
        """Return nothing: bytes were counted, see `text_bytes`."""

    @property
    def text_bytes(self) -> int | None:
        return self.index["text_bytes"] if self.index else None

    @property
    def has_targets(self) -> bool:
        return any(part.has_targets for part in self.parts)

    @cached_property
    def offsets(self) -> NDArray[np.int64]:
        """Starts of documents, and the end [documents + 1]. Split rows do not need it."""
        begins = [
            part.offsets[:-1] + self._first_token(number) for number, part in enumerate(self.parts)
        ]
        return np.concatenate([*begins, [self.size]])

    def describe(self) -> str:
        text = f"{self.size:,} tokens per epoch, from token files"
        if self.cut:
            return f"{text}, cut into documents {self.cut}"
        return f"{counted(self.documents, 'documents')}, {text}"

    def read(self, begin: int, end: int) -> NDArray[np.int64]:
        """Return tokens [begin, end). Raises DataError for an id outside the vocabulary."""
        pieces = [span.part.tokens[span.begin : span.end] for span in self._spans(begin, end)]
        joined = pieces[0] if len(pieces) == 1 else np.concatenate(pieces)
        # Unsigned numbers find negative ids too.
        unsigned = joined.view(joined.dtype.str.replace("i", "u"))
        if int(unsigned.max()) >= self.vocab_size:
            wrong = int(np.flatnonzero(unsigned >= self.vocab_size)[0])
            span = next(self._spans(begin + wrong, begin + wrong + 1))
            raise DataError(
                f"{span.part.file}, token {span.begin:,} (from 0): id {joined[wrong]} is outside "
                f"the model's vocabulary of {self.vocab_size}. Set model.vocab_size above it, or "
                f"prepare the text with the model's tokenizer{span.part.remedy}"
            )
        return joined.astype(np.int64)

    def is_target(self, begin: int, end: int) -> NDArray[np.bool_]:
        spans = self._spans(begin, end)
        return np.concatenate([span.part.is_target(span.begin, span.end) for span in spans])

    def documents_in(self, begin: int, end: int) -> NDArray[np.int64]:
        found = []
        for span in self._spans(begin, end):
            before = self._first_document(span.number), self._first_token(span.number)
            found.append(span.part.documents_in(span.begin, span.end) + before)
        return np.concatenate(found)

    def begins_in(self, begin: int, end: int) -> NDArray[np.int64]:
        found = []
        for span in self._spans(begin, end):
            before = self._first_token(span.number)
            found.append(span.part.begins_in(span.begin, span.end) + before)
        return np.concatenate(found)

    def place_of(self, document: int) -> FilePlace:
        number = bisect_right(self._documents, document)
        part = self.parts[number]
        within = document - self._first_document(number)
        if not part.sources:
            return FilePlace(str(part.file), within + 1)
        after = bisect_right(part.sources, within, key=lambda source: source.first)
        source = part.sources[after - 1]
        return FilePlace(source.file, source.record + within - source.first + 1)

    def _first_token(self, number: int) -> int:
        return self._ends[number] - self.parts[number].size

    def _first_document(self, number: int) -> int:
        return self._documents[number] - self.parts[number].documents

    def _spans(self, begin: int, end: int) -> Iterator[_Span]:
        """Iterate over parts of tokens [begin, end), whose hashes are checked from now on."""
        number = bisect_right(self._ends, begin)
        while begin < end:
            part = self.parts[number]
            first = self._first_token(number)
            stop = min(end, self._ends[number])
            if begin < stop:
                if self.check is not None:
                    self.check.begin(number)
                yield _Span(number, part, begin - first, stop - first)
            begin = stop
            number += 1

    def sample(self) -> str:
        """Check pieces from all over the files; return a digest of them and of the sizes.

        Raises DataError for an id that is too high.
        """
        sizes = [(part.size, part.dtype.str) for part in self.parts]
        digest = hashlib.sha256(f"{ORDER}\n{sizes}".encode())
        begins = np.unique(np.linspace(0, self.size - 1, _PIECES).astype(np.int64)).tolist()
        begins.append(max(self.size - _PIECE, 0))
        for begin in begins:
            piece = self.read(begin, min(begin + _PIECE, self.size))
            digest.update(piece.astype("<i8").tobytes())
        return digest.hexdigest()


# Opening


@dataclass(frozen=True)
class TokenKeys:
    """Settings of token files besides their path.

    `fields` of records are those asked for (`text_key`, …). `records` is the folder of records of
    whole parts. `dtype` of ids holds if no file tells it.
    """

    fields: Mapping[str, str | None] = field(default_factory=dict)
    records: Path | None = None
    dtype: str = "auto"
    dtype_key: str = "data.token_dtype"
    split: str | None = None


def open_source(reader: TextReader, source: DataSource, section: str) -> TokenFiles:
    """Open the token files of a source.

    Raises DataError as `open_tokens`, and for a folder prepared with another chat template.
    """
    data = reader.data
    names = ("text_key", "prompt_key", "completion_key", "messages_key")
    fields = {name: getattr(source, name) or getattr(data, name) for name in names}
    keys = TokenKeys(
        fields=fields,
        records=records_folder(data.token_cache),
        dtype=source.token_dtype or data.token_dtype,
        dtype_key=f"{section}.token_dtype" if source.token_dtype else "data.token_dtype",
        split=source.split,
    )
    path = str(source.path)
    files = open_tokens(path, reader.tokenizer, reader.vocab_size, key_of(section, "path"), keys)
    has_template = data.chat_template or data.template_date
    if has_template and fields["messages_key"] and files.index:
        from titanlite.data.chat import DAY, load_template

        prepared = files.index["options"]["chat"]
        day = data.template_date or dict(prepared[1]).get(DAY)
        template = load_template(data.chat_template, reader.tokenizer, day=day)
        if prepared != json.loads(json.dumps(template)):
            raise DataError(
                f"data.chat_template, data.template_date: {source.path} is prepared with another "
                "template or day; leave the keys out"
            )
    return files


def open_tokens(
    path: str,
    tokenizer: Tokenizer,
    vocab_size: int,
    key: str = "training.dataset_path",
    keys: TokenKeys = TokenKeys(),  # noqa: B008 - frozen
) -> TokenFiles:
    """Open token files; errors name the config's `key`.

    Raises DataError for unfinished, missing or cut files, another tokenizer or fields, and ids of
    `vocab_size` or more.
    """
    place = Path(path)
    is_folder = not is_url(path) and place.is_dir()
    try:
        if is_folder and (is_index(place / INDEX) or any(place.glob("part-*.tokens"))):
            files = _prepared(place, tokenizer, vocab_size, key, keys)
        else:
            from titanlite.data.foreign.raw import open_foreign

            parts, listing, cut = open_foreign(path, tokenizer, vocab_size, key, keys)
            files = TokenFiles(path, parts, tokenizer, vocab_size)
            files.found, files.cut = listing, cut
            files.fingerprint = files.sample()
    except OSError as error:
        raise DataError(
            f"{key}: {error.filename or path} cannot be read: {error.strerror or error}"
        ) from error
    options = files.index["options"] if files.index else {}
    for name, wanted in keys.fields.items():
        there = options.get(name)
        if wanted is None or wanted == there:
            continue
        had = f"prepared with {there!r}" if there else "tokens already, without that field"
        raise DataError(
            f"data.{name}: {wanted!r} has no effect on {path}, which is {had}; leave the key out"
        )
    return files


def _prepared(
    folder: Path, tokenizer: Tokenizer, vocab_size: int, key: str, keys: TokenKeys
) -> TokenFiles:
    from titanlite.data.prepared_tokens import hashes_of, part_of, read_index

    index = read_index(folder)
    if keys.dtype != "auto":
        raise DataError(
            f"{keys.dtype_key}: {keys.dtype} has no effect on {folder}, whose {INDEX} tells the "
            "type; leave the key out"
        )
    if index["tokenizer"] != tokenizer.fingerprint:
        raise DataError(
            f"{key}: {folder} was prepared with the tokenizer {index['tokenizer'][:16]} "
            f"({index['tokenizer_path'] or 'the bundled one'}), and this config has "
            f"{tokenizer.fingerprint[:16]}. Name that one as model.tokenizer_path, or prepare the "
            "text again"
        )
    if index["max_id"] >= vocab_size:
        raise DataError(
            f"{key}: {folder} holds the id {index['max_id']}, which is outside the model's "
            f"vocabulary of {vocab_size}; set model.vocab_size to at least {index['vocab_size']}"
        )
    parts = [part_of(folder, index, part) for part in index["parts"]]
    hashes = [hashes_of(folder, part, keys.records) for part in index["parts"]]
    for part, of_part in zip(parts, hashes, strict=True):
        if not of_part.is_known():
            part.check_offsets()
    check = HashCheck(hashes) if os.environ.get("LOCAL_RANK", "0") == "0" else None
    return TokenFiles(str(folder), parts, tokenizer, vocab_size, index, check)
