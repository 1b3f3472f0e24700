"""What the first bytes of a token file, and the small files beside it, tell.

| form | told by | tells |
|---|---|---|
| numpy | its magic bytes | type and number of tokens |
| llm.c, modded-nanogpt | 256 int32, first 20240520 (GPT-2) or 20240801 (Llama 3) | the same |
| datatrove | the name `.ds`; `.ds.metadata` and `.ds.index` beside it | the same, and documents |
| raw | nothing: the whole file is ids (Dolma's `.npy`, nanoGPT's `.bin`) | |

The type of raw ids is that of the vocabulary, if it is the only one that fits.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from titanlite.data import DataError
from titanlite.data.foreign.ranges import ByteFile

#: Most bytes of a header. numpy allows 10,000 characters.
_HEAD = 10_240
_NUMPY = b"\x93NUMPY"
#: Bytes of llm.c's header, and the three numbers in it.
_LLMC_HEAD = 1024
_LLMC_FIELDS = np.dtype([("magic", "<i4"), ("version", "<i4"), ("tokens", "<i4")])
#: Magic number of llm.c → version and type of the tokens (its dev/data/data_common.py).
_LLMC = {20240520: (1, "uint16"), 20240801: (7, "uint32")}
_LLMC_QUESTIONS = 20240522
#: First bytes of files that hold no ids.
_OTHERS = {
    b"PK\x03\x04": "a zip archive, as torch saves weights",
    b"\x80\x02\x8a\n": "a pickle, as torch saved weights before 1.6",
    b"\x1f\x8b\x08": "compressed by gzip",
    b"\x28\xb5\x2f\xfd": "compressed by zstd",
    b"PAR1": "parquet",
}
RAW = "raw ids"
LLMC = "llm.c"
DATATROVE = "datatrove"
NUMPY = "numpy"

#: Places of all files, and beginnings of files, that are looked at; of those behind URLs; and bytes
#: at each.
_PIECES = 64
_REMOTE_PIECES = 8
_PIECE = 1 << 15
#: Types for ids, the narrowest first.
_TYPES = ("uint16", "uint32", "uint64")
#: Returns a file beside a token file by the suffix to its name; None: there is none.
Beside: TypeAlias = "Callable[[str], ByteFile | None]"


class Header(NamedTuple):
    """What a file tells of itself.

    form: for messages. dtype: None where nothing tells it. tokens: None: to the end of the file.
    """

    form: str
    dtype: str | None
    first_byte: int = 0
    tokens: int | None = None


def read_header(file: ByteFile, beside: Beside) -> Header:
    """Return what a file tells of its tokens.

    Raises DataError, naming the file, for one that is empty, cut, or holds no ids.
    """
    if not file.size:
        raise DataError(f"{file.name} is empty; copy it again, or remove it")
    suffix = file.name[file.name.rfind(".") :]
    head = file.read(0, _HEAD)
    if suffix == ".npy" and head.startswith(_NUMPY):
        return _of_numpy(file, head)
    for magic, what in _OTHERS.items():
        if head.startswith(magic):
            raise DataError(f"{file.name} is {what}, and holds no ids; leave it out")
    if suffix == ".ds":
        return _of_datatrove(file, beside)
    return _of_llmc(file, head) or Header(RAW, None)


def _of_numpy(file: ByteFile, head: bytes) -> Header:
    stream = io.BytesIO(head)
    try:
        version = np.lib.format.read_magic(stream)
        if version == (1, 0):
            found = np.lib.format.read_array_header_1_0(stream)
        else:
            found = np.lib.format.read_array_header_2_0(stream)
    except (ValueError, EOFError) as error:
        raise DataError(f"{file.name}: no array of numpy: {error}") from None
    shape, _, dtype = found
    if len(shape) != 1 or dtype.kind not in "ui":
        raise DataError(
            f"{file.name}: expected one row of whole numbers, found {dtype} of shape {shape}"
        )
    header = Header(NUMPY, dtype.str, stream.tell(), shape[0])
    _check_size(file, header, dtype)
    return header


def _of_llmc(file: ByteFile, head: bytes) -> Header | None:
    """Return what llm.c's header tells; None for a file without one."""
    if len(head) < _LLMC_FIELDS.itemsize:
        return None
    magic, version, tokens = np.frombuffer(head, _LLMC_FIELDS, 1)[0].tolist()
    if magic == _LLMC_QUESTIONS:
        raise DataError(f"{file.name} holds llm.c's questions (version {version}), and no text")
    if magic not in _LLMC:
        return None
    known_version, dtype = _LLMC[magic]
    if version != known_version or tokens < 0:
        raise DataError(
            f"{file.name}: llm.c's header {magic} has version {version} and {tokens:,} tokens; "
            f"version {known_version} is known. Write the file again"
        )
    header = Header(LLMC, dtype, _LLMC_HEAD, tokens)
    _check_size(file, header, np.dtype(dtype))
    return header


def _of_datatrove(file: ByteFile, beside: Beside) -> Header:
    """Return what the files beside a `.ds` file tell: its metadata, else its index.

    The metadata are `tokenizer|bytes of a token`, tokens, a rounded size.
    """
    metadata = beside(".metadata")
    index = beside(".index")
    if metadata is not None:
        lines = metadata.read(0, _HEAD).decode("utf-8", "replace").splitlines()
        try:
            item = int(lines[0].rpartition("|")[2])
            tokens = int(lines[1])
        except (LookupError, ValueError):
            raise DataError(
                f"{metadata.name}: no metadata of datatrove, whose first line ends with |2 or |4"
            ) from None
    elif index is not None:
        # The end of the last document.
        tokens = int.from_bytes(index.read(max(index.size - 8, 0), 8), "little")
        item = file.size // max(tokens, 1)
    else:
        return Header(DATATROVE, None)
    if item not in (2, 4):
        raise DataError(f"{file.name}: tokens of {item} bytes are not known; 2 or 4 are")
    header = Header(DATATROVE, f"uint{8 * item}", 0, tokens)
    _check_size(file, header, np.dtype(f"u{item}"))
    return header


def _check_size(file: ByteFile, header: Header, dtype: np.dtype[Any]) -> None:
    """Raise DataError unless the file holds the tokens that its header tells."""
    assert header.tokens is not None
    size = header.first_byte + header.tokens * dtype.itemsize
    if file.size != size:
        raise DataError(
            f"{file.name} has {file.size:,} bytes instead of {size:,} for {header.tokens:,} tokens "
            f"of {dtype}; copy it again"
        )


# The type that no header tells


class Vocabulary(NamedTuple):
    """Sizes that limit ids: the tokenizer's decides the type, the model's the highest id."""

    tokenizer: int
    model: int

    @property
    def type_name(self) -> str:
        """The narrowest type of its ids, that tools write."""
        return "uint16" if self.tokenizer <= 1 << 16 else "uint32"


class _Misfit(NamedTuple):
    """A token, from 0, whose id is outside the vocabulary."""

    file: ByteFile
    token: int
    id: int


def guess_type(files: Sequence[ByteFile], vocabulary: Vocabulary, key: str) -> str:
    """Return the type of ids in files without a header, after a look at pieces of them.

    key: of the config, that gives the type. Raises DataError where ids of that type are outside the
    vocabulary, or a wider type fits too: tokens of 4 bytes, read as 2, are ids and zeros.
    """
    expected = vocabulary.type_name
    pieces = list(_pieces(files))
    for file, fitting in _wider_types(expected, pieces, vocabulary.model):
        others = " and ".join(fitting)
        raise DataError(
            f"{key}: {file.name} has no header, and its ids could be {expected} or {others}. "
            f'Say which: {key} = "{fitting[0]}" (or "{expected}")'
        )
    check_sizes(files, expected, key)
    wrong = _misfit(expected, pieces, vocabulary.model)
    if wrong is not None:
        raise DataError(
            f"{wrong.file.name}, token {wrong.token:,} (from 0): id {wrong.id} is outside the "
            f"model's vocabulary of {vocabulary.model}. The file has no header and is read as "
            f"{expected}. Set {key} to the type that wrote it, or model.vocab_size above the id"
        )
    return expected


def check_sizes(files: Sequence[ByteFile], type_name: str, key: str) -> None:
    """Raise DataError for a file whose size is no whole number of ids."""
    item = np.dtype(type_name).itemsize
    for file in files:
        if file.size % item:
            raise DataError(
                f"{file.name} has {file.size:,} bytes, which are no whole number of ids of "
                f"{item} bytes ({type_name}). It was cut, or {key} must name another type"
            )


def _pieces(files: Sequence[ByteFile]) -> Iterator[tuple[ByteFile, int, bytes]]:
    """Yield file, first byte and bytes of pieces from everywhere, in order."""
    ends = np.cumsum([file.size for file in files])
    total = int(ends[-1])
    pieces = _REMOTE_PIECES if files[0].is_remote else _PIECES
    everywhere = np.linspace(0, total - 1, pieces).astype(np.int64)
    some_files = np.linspace(0, len(files) - 1, pieces).astype(np.int64)
    begins = ends - [file.size for file in files]
    places = np.unique(np.concatenate([everywhere, begins[some_files]]))
    for place in places.tolist():
        number = int(np.searchsorted(ends, place, side="right"))
        file = files[number]
        # Every type begins at a multiple of 8 bytes.
        begin = (place - int(begins[number])) // 8 * 8
        yield file, begin, file.read(begin, _PIECE)


def _wider_types(
    expected: str, pieces: Sequence[tuple[ByteFile, int, bytes]], vocab_size: int
) -> Iterator[tuple[ByteFile, list[str]]]:
    """Yield each file whose pieces are also ids of wider types, with the types.

    A folder may hold files of several types.
    """
    of_files: dict[str, list[tuple[ByteFile, int, bytes]]] = {}
    for piece in pieces:
        of_files.setdefault(piece[0].name, []).append(piece)
    for own in of_files.values():
        file = own[0][0]
        fitting: list[str] = []
        for name in _TYPES[_TYPES.index(expected) + 1 :]:
            is_whole = file.size % np.dtype(name).itemsize == 0
            if is_whole and _misfit(name, own, vocab_size) is None:
                fitting.append(name)
        if fitting:
            yield file, fitting


def _misfit(
    type_name: str, pieces: Sequence[tuple[ByteFile, int, bytes]], vocab_size: int
) -> _Misfit | None:
    """Return the first id outside the vocabulary, if the pieces are of this type."""
    dtype = np.dtype(type_name).newbyteorder("<")
    for file, begin, piece in pieces:
        ids: NDArray[np.unsignedinteger] = np.frombuffer(piece, dtype, len(piece) // dtype.itemsize)
        over = np.flatnonzero(ids >= vocab_size)
        if len(over):
            first = int(over[0])
            return _Misfit(file, begin // dtype.itemsize + first, int(ids[first]))
    return None
