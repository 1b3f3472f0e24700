"""Tokens in files that are mapped into memory: prepared by `titanlite data prepare`, or by other
programs.

A prepared folder has `index.json`, written last and atomically, and parts: `part-*.tokens` (ids,
little-endian uint16, uint32 for vocabularies over 65,536), `.offsets` (int64 [documents + 1], where
documents begin in the part) and, for records with prompts, `.targets` (bits, lowest first: 0 where
a token is no target). Megatron-LM's `.bin` and `.idx` and numpy's `.npy` are read as they are; a
`.npy` file is one document.

The memory of a rank does not grow with the corpus: parts are mapped when they are first read, and
the pages of a map belong to the system's page cache.
"""

from __future__ import annotations

import hashlib
import json
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import accumulate
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from titanlite.data import DataError
from titanlite.data.corpus import DocumentArray
from titanlite.data.listing import Listing
from titanlite.data.rows import FilePlace
from titanlite.data.sources import key_of
from titanlite.data.token_cache import records_folder
from titanlite.data.token_checks import REPAIR, HashCheck, PartHashes, check_offsets, check_part
from titanlite.data.token_paths import INDEX, is_index, pair_of
from titanlite.data.tokenizer import Tokenizer
from titanlite.utils import counted, logger, parse_json

if TYPE_CHECKING:
    from titanlite.config.data_sections import DataSource
    from titanlite.data.text import TextReader

VERSION = 1
#: Part of the fingerprint. Change it with anything that changes the rows of a folder.
ORDER = "windows of the stream of tokens, order 1"
#: Pieces of foreign files that are read at the start, and tokens in each.
_PIECES, _PIECE = 256, 4096
#: Sequences of Megatron's index that are compared together.
_GROUP = 1 << 20
#: Head of Megatron's index, the last two numbers are of sequences and of documents + 1; and codes
#: of types there.
_MEGATRON = np.dtype(
    [("magic", "S9"), ("version", "<u8"), ("code", "u1"), ("sequences", "<u8"), ("bounds", "<u8")]
)
_DTYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}


@dataclass
class Part(DocumentArray):
    """One file of `size` tokens, in which so many documents begin; mapped when it is first read.

    `tokens`: [size], plain arrays over the maps: slices of a memmap are slower. `offsets`:
    [documents + 1].
    """

    file: Path
    dtype: np.dtype[Any]
    size: int
    documents: int
    find_offsets: Callable[[], NDArray[np.int64]]
    #: Byte of the first token.
    first: int = 0
    has_targets: bool = False
    #: (source, number of the first document of it, within the part and within the source), in
    #: order.
    sources: Sequence[tuple[str, int, int]] = ()

    @cached_property
    def tokens(self) -> NDArray[Any]:  # type: ignore[override]
        return _map(self.file, self.dtype, self.size, self.first)

    @cached_property
    def offsets(self) -> NDArray[np.int64]:  # type: ignore[override]
        return self.find_offsets()

    @cached_property
    def _target_bits(self) -> NDArray[Any]:
        return _map(self.file.with_suffix(".targets"), "u1", -(-self.size // 8))

    def is_target(self, begin: int, end: int) -> NDArray[np.bool_]:
        """Return whether tokens [begin, end) are targets."""
        if not self.has_targets:
            return np.ones(end - begin, dtype=bool)
        bits = np.unpackbits(self._target_bits[begin // 8 : -(-end // 8)], bitorder="little")
        return bits[begin % 8 : begin % 8 + end - begin].astype(bool)


def _map(file: Path, dtype: Any, count: int, first: int = 0) -> NDArray[Any]:
    if count == 0:
        return np.zeros(0, dtype)
    return np.memmap(file, dtype=dtype, mode="r", offset=first, shape=(count,)).view(np.ndarray)


class TokenFiles:
    """A corpus of token files, read as one array.

    Args:
        path: of the folder or file, for messages.
        parts: in order.
        tokenizer: whose BOS and EOS are in the text.
        vocab_size: of the model; no id may be as high.
        index: content of `index.json`; None: files of another program, of which only samples are
            checked at the start.
        check: compares the hashes of the parts that are read.

    Raises DataError for an id that is too high, naming file and place, if there are no tokens, and
    when it reads after the hashes of a part were found not to fit.
    """

    keeps_order: ClassVar[bool] = True
    files: ClassVar[tuple[Path, ...]] = ()

    def __init__(
        self,
        path: Path,
        parts: list[Part],
        tokenizer: Tokenizer,
        vocab_size: int,
        index: Mapping[str, Any] | None = None,
        check: HashCheck | None = None,
    ) -> None:
        self.check = check
        self.path, self.parts, self.vocab_size, self.index = path, parts, vocab_size, index
        self.pad_id = tokenizer.eos_id
        self._ends = list(accumulate(part.size for part in parts))
        self._documents = list(accumulate(part.documents for part in parts))
        if not parts or not self.size:
            raise DataError(f"{path} holds no tokens")
        self.fingerprint = str(index["fingerprint"]) if index else self._sample()

    @property
    def listing(self) -> Listing:
        """The files, for reports."""
        names = tuple(str(part.file) for part in self.parts)
        size = sum(part.size * part.dtype.itemsize for part in self.parts)
        return Listing(names, {"tokens": len(names)}, size, None, {}, {})

    @property
    def size(self) -> int:
        """Number of tokens."""
        return self._ends[-1]

    @property
    def documents(self) -> int:
        return self._documents[-1]

    @property
    def text_bytes(self) -> int | None:
        return self.index["text_bytes"] if self.index else None

    def describe(self) -> str:
        """Return the size in words."""
        documents = counted(self.documents, "documents")
        return f"{documents}, {self.size:,} tokens per epoch, from token files"

    @property
    def has_targets(self) -> bool:
        return any(part.has_targets for part in self.parts)

    @cached_property
    def offsets(self) -> NDArray[np.int64]:
        """Where documents begin, and the end [documents + 1], in memory. Split rows need it not."""
        begins = [
            part.offsets[:-1] + end - part.size
            for part, end in zip(self.parts, self._ends, strict=True)
        ]
        return np.concatenate([*begins, [self.size]])

    def _pieces(self, begin: int, end: int) -> Iterator[tuple[int, Part, int, int]]:
        """Iterate over the parts of tokens [begin, end): (number, part, first and end
        within it).
        """
        number = bisect_right(self._ends, begin)
        while begin < end:
            part, start = self.parts[number], self._ends[number] - self.parts[number].size
            stop = min(end, self._ends[number])
            if begin < stop:
                if self.check is not None:
                    self.check.begin(number)
                yield number, part, begin - start, stop - start
            begin, number = stop, number + 1

    def read(self, begin: int, end: int) -> NDArray[np.int64]:
        """Return tokens [begin, end). Raises DataError for an id outside the vocabulary."""
        pieces = [part.tokens[a:b] for _, part, a, b in self._pieces(begin, end)]
        ids = (pieces[0] if len(pieces) == 1 else np.concatenate(pieces)).astype(np.int64)
        if (
            int(ids.view(np.uint64).max()) >= self.vocab_size
        ):  # unsigned: it finds negative ones too
            wrong = int(np.flatnonzero(ids.view(np.uint64) >= self.vocab_size)[0])
            _, part, place, _ = next(self._pieces(begin + wrong, begin + wrong + 1))
            raise DataError(
                f"{part.file}, token {place:,} (from 0): id {ids[wrong]} is outside the model's "
                f"vocabulary of {self.vocab_size}; set model.vocab_size above it, or prepare the "
                "text with the model's tokenizer"
            )
        return ids

    def is_target(self, begin: int, end: int) -> NDArray[np.bool_]:
        """Return whether tokens [begin, end) are targets."""
        return np.concatenate([part.is_target(a, b) for _, part, a, b in self._pieces(begin, end)])

    def documents_in(self, begin: int, end: int) -> NDArray[np.int64]:
        """Return the documents of tokens [begin, end), see `DocumentArray`."""
        found = []
        for n, part, first, last in self._pieces(begin, end):
            before = self._documents[n] - part.documents, self._ends[n] - part.size
            found.append(part.documents_in(first, last) + before)
        return np.concatenate(found)

    def place_of(self, document: int) -> FilePlace:
        """Return the source of a document."""
        number = bisect_right(self._documents, document)
        part, within = (
            self.parts[number],
            document - (self._documents[number] - self.parts[number].documents),
        )
        if not part.sources:
            return FilePlace(str(part.file), within + 1)
        source, first, counted_from = part.sources[
            bisect_right(part.sources, within, key=lambda one: one[1]) - 1
        ]
        return FilePlace(source, counted_from + within - first + 1)

    def _sample(self) -> str:
        """Check pieces from all over the files; return a digest of them and of the sizes."""
        digest = hashlib.sha256(
            f"{ORDER}\n{[(part.size, part.dtype.str) for part in self.parts]}".encode()
        )
        for begin in np.unique(np.linspace(0, self.size - 1, _PIECES).astype(np.int64)).tolist():
            digest.update(self.read(begin, min(begin + _PIECE, self.size)).astype("<i8").tobytes())
        digest.update(self.read(max(self.size - _PIECE, 0), self.size).astype("<i8").tobytes())
        return digest.hexdigest()


# Opening


def open_source(reader: TextReader, source: DataSource, section: str) -> TokenFiles:
    """Open the token files of a source. section: of the config, for errors.

    Raises DataError as `open_tokens`, and for a folder that was prepared with another chat
    template.
    """
    data = reader.data
    names = ("text_key", "prompt_key", "completion_key", "messages_key")
    fields = {name: getattr(source, name) or getattr(data, name) for name in names}
    key = key_of(section, "path")
    records = records_folder(data.token_cache)
    files = open_tokens(str(source.path), reader.tokenizer, reader.vocab_size, key, fields, records)
    if data.chat_template and fields["messages_key"] and files.index:
        from titanlite.data.chat import load_template

        template = load_template(data.chat_template, reader.tokenizer)
        if files.index["options"]["chat"][0] != template.source:
            raise DataError(
                f"data.chat_template: {source.path} is prepared with another one; leave the key out"
            )
    return files


def open_tokens(
    path: str,
    tokenizer: Tokenizer,
    vocab_size: int,
    key: str = "training.dataset_path",
    fields: Mapping[str, str | None] = MappingProxyType({}),
    records: Path | None = None,
) -> TokenFiles:
    """Open token files.

    key: of the config, for errors. fields: of records, that the config asks for (`text_key`, …).

    records: folder that keeps which parts of prepared folders are whole, see
    `titanlite.data.token_checks`.

    Raises DataError for a folder that is not finished, a missing or cut file, tokens of another
    tokenizer or of other fields, and ids of `vocab_size` (the model's) or more.
    """
    place = Path(path)
    try:
        if place.is_dir() and (is_index(place / INDEX) or any(place.glob("part-*.tokens"))):
            files = _prepared(place, tokenizer, vocab_size, key, records)
        else:
            files = TokenFiles(place, foreign_parts(place), tokenizer, vocab_size)
    except OSError as error:
        raise DataError(
            f"{key}: {error.filename or path} cannot be read: {error.strerror or error}"
        ) from error
    options = files.index["options"] if files.index else {}
    for name, wanted in fields.items():
        if wanted is not None and wanted != options.get(name):
            had = (
                f"prepared with {options[name]!r}"
                if options.get(name)
                else "tokens already, without that field"
            )
            raise DataError(
                f"data.{name}: {wanted!r} has no effect on {path}, which is {had}; leave the key "
                "out"
            )
    return files


def read_index(folder: Path) -> dict[str, Any]:
    """Return the content of a prepared folder's index.

    Raises DataError for a folder without one, or a damaged one.
    """
    try:
        index: dict[str, Any] = parse_json((folder / INDEX).read_bytes())
        if index["version"] > VERSION:
            raise DataError(
                f"{folder / INDEX} has version {index['version']}; this titanlite reads "
                f"{VERSION}: upgrade"
            )
        if index["fingerprint"] != fingerprint_of(index):
            raise ValueError("it does not fit its fingerprint")
    except FileNotFoundError:
        again = f"run `titanlite data prepare ... --out {folder}` again"
        raise DataError(f"{folder} is not finished: it has no {INDEX}; {again}") from None
    except (ValueError, LookupError, TypeError, RecursionError) as error:
        if isinstance(error, DataError):
            raise
        raise DataError(
            f"{folder / INDEX} is damaged ({error}); remove the folder, and prepare it again"
        ) from None
    return index


def fingerprint_of(index: Mapping[str, Any]) -> str:
    """Return the hex digest of a folder's content: tokens, documents, targets and tokenizer; not of
    its sources.
    """
    parts = [
        [part[name] for name in ("tokens", "documents", "checksums")] for part in index["parts"]
    ]
    decisive = [ORDER, index["dtype"], index["tokenizer"], parts]
    return hashlib.sha256(json.dumps(decisive, sort_keys=True).encode()).hexdigest()


def _prepared(
    folder: Path, tokenizer: Tokenizer, vocab_size: int, key: str, records: Path | None
) -> TokenFiles:
    index = read_index(folder)
    if index["tokenizer"] != tokenizer.fingerprint:
        raise DataError(
            f"{key}: {folder} was prepared with the tokenizer {index['tokenizer'][:16]} "
            f"({index['tokenizer_path'] or 'the bundled one'}), and this config has "
            f"{tokenizer.fingerprint[:16]}; name that one as model.tokenizer_path, or prepare the "
            "text again"
        )
    if index["max_id"] >= vocab_size:
        raise DataError(
            f"{key}: {folder} holds the id {index['max_id']}, which is outside the model's "
            f"vocabulary of {vocab_size}; set model.vocab_size to at least {index['vocab_size']}"
        )
    parts = parts_of(folder, index)
    hashes = part_hashes(folder, index, records)
    known = [one.is_known() for one in hashes]
    for part, is_known in zip(parts, known, strict=True):
        if not is_known:
            check_offsets(part.file.with_suffix(".offsets"), part.find_offsets(), part.size)
    without = sum(not one.hashes for one in hashes)
    if without:
        logger.info(
            f"{key}: {counted(without, 'parts')} of {folder} have no hashes: sizes and offsets "
            "alone are checked"
        )
    repair = f"`titanlite data verify {folder}` names all damaged parts; {REPAIR}"
    return TokenFiles(folder, parts, tokenizer, vocab_size, index, HashCheck(hashes, repair))


def parts_of(folder: Path, index: Mapping[str, Any]) -> list[Part]:
    """Return the parts of a prepared folder.

    Raises DataError for an index or sizes that do not fit, OSError for files that are not there.
    """
    parts, item = [], np.dtype(index["dtype"]).itemsize
    for one in index["parts"]:
        try:
            check_part(folder, one, item)
            parts.append(part_of(folder, index, one))
        except (LookupError, TypeError, AttributeError) as error:
            raise DataError(
                f"{folder / INDEX} is damaged ({error!r}); prepare the folder again"
            ) from None
    return parts


def part_of(folder: Path, index: Mapping[str, Any], part: Mapping[str, Any]) -> Part:
    """Return a part of a prepared folder from its record in the index."""
    file, documents = folder / f"{part['name']}.tokens", part["documents"]
    find_offsets = partial(_map, file.with_suffix(".offsets"), "<i8", documents + 1)
    sources = [
        (index["files"][source], within, number) for source, within, number in part["sources"]
    ]
    has_targets = "targets" in part["bytes"]
    return Part(
        file,
        np.dtype(index["dtype"]),
        part["tokens"],
        documents,
        find_offsets,
        0,
        has_targets,
        sources,
    )


def part_hashes(folder: Path, index: Mapping[str, Any], records: Path | None) -> list[PartHashes]:
    """Return the hashes of each part of a prepared folder.

    records: folder of the records of whole parts.
    """
    return [
        PartHashes(
            {folder / f"{one['name']}.{suffix}": text for suffix, text in one["checksums"].items()},
            records,
        )
        for one in index["parts"]
    ]


def foreign_parts(place: Path, thorough: bool = False) -> list[Part]:
    """Return the files of another program: one path, or all of a folder.

    thorough: compare the place of each of Megatron-LM's sequences, not of some alone. Raises
    DataError for files that are not whole, and OSError for those that cannot be read.
    """
    suffix = ".idx" if any(place.glob("*.idx")) else ".npy"
    names = sorted(place.glob(f"*{suffix}")) if place.is_dir() else [place]
    return [_npy(name) if name.suffix == ".npy" else _megatron(name, thorough) for name in names]


def _npy(file: Path) -> Part:
    try:
        array = np.load(file, mmap_mode="r")
    except (ValueError, EOFError) as error:
        raise DataError(f"{file}: no array of numpy: {error}") from None
    if array.ndim != 1 or array.dtype.kind not in "ui":
        raise DataError(
            f"{file}: expected one row of whole numbers, found {array.dtype} of shape {array.shape}"
        )
    return Part(
        file, array.dtype, len(array), 1, partial(np.array, [0, len(array)]), first=array.offset
    )


def _megatron(name: Path, thorough: bool) -> Part:
    """Open Megatron-LM's files (its megatron/core/datasets/indexed_dataset.py).

    Their sequences must lie end to end.

    After the head of `.idx` come int32 lengths and int64 byte positions of the sequences, and int64
    numbers of the sequences at which documents begin.
    """
    file, index = pair_of(name)
    head = np.fromfile(index, _MEGATRON, 1)
    if not len(head) or head["magic"][0] != b"MMIDIDX":
        raise DataError(f"{index}: no index of Megatron-LM")
    _, version, code, count, bounds = head[0].tolist()
    if version != 1 or code not in _DTYPES:
        raise DataError(
            f"{index}: version {version} with type {code} is not known; expected version 1"
        )
    begin, found = _MEGATRON.itemsize, index.stat().st_size
    size = begin + 12 * count + 8 * bounds
    if found not in (size, size + count):  # a byte per sequence for multimodal data
        raise DataError(f"{index} has {found:,} bytes instead of {size:,}; copy the file again")
    lengths, positions = (
        _map(index, "<i4", count, begin),
        _map(index, "<i8", count, begin + 4 * count),
    )
    documents = _map(index, "<i8", bounds, begin + 12 * count)
    dtype, end = np.dtype(_DTYPES[code]), file.stat().st_size
    if count:
        for some in _numbers(count, thorough):
            after = np.where(some < count - 1, positions[np.minimum(some + 1, count - 1)], end)
            if (
                positions[0] != 0
                or (positions[some] + lengths[some] * np.int64(dtype.itemsize) != after).any()
            ):
                raise DataError(f"{index}: the sequences do not lie end to end in {file.name}")
    is_in_order = not (np.diff(documents) < 0).any()
    if bounds and not (is_in_order and documents[0] >= 0 and documents[-1] <= count):
        raise DataError(
            f"{index} is damaged: its documents are not in the order of its {count:,} sequences"
        )

    def offsets() -> NDArray[np.int64]:
        found: NDArray[np.int64] = np.append(positions, end)[documents] // dtype.itemsize
        return found

    return Part(file, dtype, end // dtype.itemsize, max(bounds - 1, 0), offsets)


def _numbers(count: int, all_of_them: bool) -> Iterator[NDArray[np.int64]]:
    """Yield numbers below `count` in groups: all, or some from everywhere."""
    if not all_of_them:
        yield np.unique(np.linspace(0, count - 1, _PIECES).astype(np.int64))
        return
    for begin in range(0, count, _GROUP):
        yield np.arange(begin, min(begin + _GROUP, count))
