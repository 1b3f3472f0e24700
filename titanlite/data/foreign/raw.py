"""Files of token ids of other programs: their headers and types, and where documents begin.

| form | told by | tells |
|---|---|---|
| numpy | its magic bytes | type and number of tokens |
| llm.c, modded-nanogpt | 256 int32, first 20240520 (GPT-2) or 20240801 (Llama 3) | the same |
| raw | nothing: the whole file is ids (Dolma's `.npy`, nanoGPT's `.bin`, datatrove's `.ds`) | |

The type of raw ids is that of the vocabulary, if it is the only one that fits. Most tools end a
document with EOS (nanoGPT, Dolma); llm.c begins each with its end-of-text id. The first token of
the first file tells which: BOS or EOS there leads its document.
"""

from __future__ import annotations

import io
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from titanlite.data import DataError
from titanlite.data.foreign.find import MEGATRON, find_tokens
from titanlite.data.foreign.megatron import megatron_part
from titanlite.data.listing import Listing, Place
from titanlite.data.mapped_tokens import Part
from titanlite.utils import logger, progress_text

if TYPE_CHECKING:
    from titanlite.data.token_files import TokenKeys
    from titanlite.data.tokenizer import Tokenizer

#: Most bytes of a header. numpy allows 10,000 characters.
_HEAD = 10_240
_NUMPY = b"\x93NUMPY"
#: Bytes of llm.c's header. Its magic number → version, and type of the tokens (its
#: dev/data/data_common.py).
_LLMC_HEAD = 1024
_LLMC = {20240520: (1, "uint16"), 20240801: (7, "uint32")}

#: Most files that are looked at to find their type, and bytes of a piece of each.
_FILES = 64
_PIECE = 1 << 15
#: Types for ids, the narrowest first.
_TYPES = ("uint16", "uint32", "uint64")
#: Tokens at the head of the first file that tell how documents are divided.
_FIRST_TOKENS = 1 << 16
#: Tokens that are looked at together.
_TOKENS = 1 << 22
#: Seconds between two lines of progress.
_REPORT_SECONDS = 10.0


class RawFile(NamedTuple):
    """A file and what it tells of its tokens.

    `tokens` None goes to its end. With `leads` an id between documents is the first of its
    document.
    """

    path: Path
    size: int
    dtype: str | None = None
    first_byte: int = 0
    tokens: int | None = None
    leads: bool = False

    def read(self, begin: int, count: int) -> bytes:
        """Return `count` bytes from `begin`; fewer at the file's end."""
        with open(self.path, "rb", buffering=0) as stream:
            stream.seek(begin)
            return stream.read(count)


def open_foreign(
    path: str, tokenizer: Tokenizer, vocab_size: int, key: str, keys: TokenKeys
) -> tuple[list[Part], Listing, str]:
    """Open another program's token files; return parts, files, and in words what separates
    documents.

    Raises DataError for damaged files, several kinds or an open type of ids, and OSError for
    unreadable files.
    """
    listing = find_tokens(Place(path, key, keys.split))
    names = list(map(Path, listing.files))
    if MEGATRON in listing.kinds:
        return list(map(megatron_part, names)), listing, ""
    files = list(map(read_header, names))
    raw = []
    for file in files:
        told = file.dtype and str(np.dtype(file.dtype))
        if not told:
            raw.append(file)
        elif keys.dtype not in ("auto", told):
            raise DataError(
                f"{keys.dtype_key}: {keys.dtype} has no effect on {file.path}, which tells that "
                f"its ids are {told}; leave the key out"
            )
    raw_type = keys.dtype
    if raw and raw_type == "auto":
        raw_type = guess_type(raw, tokenizer.vocab_size, vocab_size, keys.dtype_key)
        logger.info(
            f"{key}: {path} does not tell the type of its ids. They are read as {raw_type}, since "
            f"the vocabulary has {tokenizer.vocab_size:,} ({keys.dtype_key} names another type)"
        )
    first = files[0]
    dtype = np.dtype(first.dtype or raw_type)
    head = first.read(first.first_byte, _FIRST_TOKENS * dtype.itemsize)
    first_tokens = np.frombuffer(head, dtype, len(head) // dtype.itemsize)
    cut = find_cut(first_tokens, tokenizer, first.leads)
    if len(first_tokens) == _FIRST_TOKENS and not (first_tokens == cut.id).any():
        logger.warning(
            f"{key}: the first {_FIRST_TOKENS:,} tokens of {first.path} do not hold id {cut.id}, "
            "which divides documents: is model.tokenizer_path theirs?"
        )
    parts: list[Part] = []
    for file in files:
        dtype = np.dtype(file.dtype or raw_type)
        tokens, rest = divmod(file.size - file.first_byte, dtype.itemsize)
        if rest:
            raise DataError(
                f"{file.path} has {file.size:,} bytes, which are no whole number of ids of "
                f"{dtype.itemsize} bytes ({dtype}). It was cut, or {keys.dtype_key} must name "
                "another type"
            )
        remedy = "" if file.dtype else f", or set {keys.dtype_key} if they are not {dtype}"
        parts.append(ForeignPart(file.path, dtype, tokens, file.first_byte, remedy=remedy, cut=cut))
    return parts, listing, str(cut)


# Headers and types


def read_header(path: Path) -> RawFile:
    """Return a file and what it tells. Raises DataError if it is empty, cut, or holds no ids."""
    file = RawFile(path, path.stat().st_size)
    head = file.read(0, _HEAD)
    if not head:
        raise DataError(f"{path} is empty; copy it again, or remove it")
    if path.suffix == ".ds" and path.with_name(f"{path.name}.loss").exists():
        raise DataError(
            f"{path}.loss masks tokens, which is not read; prepare the text, or remove the file to "
            "train on all tokens"
        )
    if head.startswith(_NUMPY):
        file = _of_numpy(file, head)
    else:
        magic, version, tokens = np.frombuffer(head.ljust(12, b"\0"), "<i4", 3).tolist()
        if magic not in _LLMC:
            return file
        known, dtype = _LLMC[magic]
        if version != known:
            raise DataError(
                f"{path} is llm.c's, of version {version}; expected version {known}: write it again"
            )
        file = RawFile(path, file.size, dtype, _LLMC_HEAD, tokens, leads=True)
    assert file.tokens is not None
    size = file.first_byte + file.tokens * np.dtype(file.dtype).itemsize
    if file.size != size:
        raise DataError(
            f"{path} has {file.size:,} bytes instead of {size:,} for {file.tokens:,} tokens of "
            f"{np.dtype(file.dtype)}; copy it again"
        )
    return file


def _of_numpy(file: RawFile, head: bytes) -> RawFile:
    stream = io.BytesIO(head)
    try:
        major, _ = np.lib.format.read_magic(stream)
        read = getattr(np.lib.format, f"read_array_header_{major}_0")
        shape, _, dtype = read(stream)
    except (ValueError, EOFError, AttributeError) as error:
        raise DataError(f"{file.path}: no array of numpy: {error}") from None
    if len(shape) != 1 or dtype.kind not in "ui":
        raise DataError(
            f"{file.path}: expected one row of whole numbers, found {dtype} of shape {shape}"
        )
    return file._replace(dtype=dtype.str, first_byte=stream.tell(), tokens=shape[0])


def guess_type(files: Sequence[RawFile], tokenizer_size: int, vocab_size: int, key: str) -> str:
    """Return the narrowest type of ids for the tokenizer, for files without a header.

    Raises DataError, naming `key`, if a wider one fits too: 4-byte tokens read as 2 are ids and
    zeros.
    """
    expected = "uint16" if tokenizer_size <= 1 << 16 else "uint32"
    wider = _TYPES[_TYPES.index(expected) + 1 :]
    for number in np.unique(np.linspace(0, len(files) - 1, _FILES).astype(np.int64)):
        file = files[number]
        fitting = [name for name in wider if _fits(file, np.dtype(name), vocab_size)]
        if fitting:
            raise DataError(
                f"{key}: {file.path} has no header, and its ids could be {expected} or "
                f'{" and ".join(fitting)}. Say which: {key} = "{fitting[0]}" (or "{expected}")'
            )
    return expected


def _fits(file: RawFile, dtype: np.dtype[Any], vocab_size: int) -> bool:
    if file.size % dtype.itemsize:
        return False
    last = max(file.size - _PIECE, 0) // 8 * 8
    pieces = [file.read(begin, _PIECE) for begin in (0, last // 16 * 8, last)]
    return all((np.frombuffer(piece, dtype) < vocab_size).all() for piece in pieces)


# Documents


class Cut(NamedTuple):
    """The id between documents, and whether it is a document's first token or last."""

    id: int
    leads: bool

    def __str__(self) -> str:
        return f"{'before' if self.leads else 'after'} id {self.id}"

    def inner(self, tokens: NDArray[Any], begin: int, end: int) -> NDArray[np.int64]:
        first = begin + 1 if self.leads else begin
        last = end if self.leads else end - 1
        piece = tokens[first:last]
        return np.flatnonzero(piece == self.id) + (begin + 1)


def find_cut(first_tokens: NDArray[Any], tokenizer: Tokenizer, has_leading_ids: bool) -> Cut:
    """Return where documents are cut, from the first tokens of the first file.

    `has_leading_ids` tells that the program's documents begin with such an id.
    """
    ends = (tokenizer.bos_id, tokenizer.eos_id)
    if len(first_tokens) and int(first_tokens[0]) in ends:
        return Cut(int(first_tokens[0]), leads=True)
    if not has_leading_ids:
        return Cut(tokenizer.eos_id, leads=False)
    has_bos = bool((first_tokens == tokenizer.bos_id).any())
    return Cut(tokenizer.bos_id if has_bos else tokenizer.eos_id, leads=True)


@dataclass
class ForeignPart(Part):
    """A file that begins and ends with whole documents, which `cut` tells apart."""

    cut: Cut = Cut(0, leads=False)

    def find_offsets(self) -> NDArray[np.int64]:
        begins = [np.zeros(1, np.int64)]
        began = reported = time.monotonic()
        for begin in range(0, self.size, _TOKENS):
            # The first token of each group is looked at with the group before.
            end = min(begin + _TOKENS + 1, self.size)
            begins.append(self.cut.inner(self.tokens, begin, end))
            now = time.monotonic()
            if now - reported > _REPORT_SECONDS:
                reported = now
                share = progress_text(end, self.size, now - began)
                logger.info(f"looking for documents in {self.file}: {share}")
        if self.size:
            begins.append(np.array([self.size]))
        return np.concatenate(begins)

    def begins_in(self, begin: int, end: int) -> NDArray[np.int64]:
        return np.concatenate([[begin], self.cut.inner(self.tokens, begin, end)])
