"""What the first bytes of a token file tell.

| form | told by | tells |
|---|---|---|
| numpy | its magic bytes | type and number of tokens |
| llm.c, modded-nanogpt | 256 int32, first 20240520 (GPT-2) or 20240801 (Llama 3) | the same |
| raw | nothing: the whole file is ids (Dolma's `.npy`, nanoGPT's `.bin`, datatrove's `.ds`) | |

The type of raw ids is that of the vocabulary, if it is the only one that fits.
"""

from __future__ import annotations

import io
import threading
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from titanlite.data import DataError
from titanlite.data.foreign.ranges import ByteFile

#: Most bytes of a header. numpy allows 10,000 characters.
_HEAD = 10_240
_NUMPY = b"\x93NUMPY"
#: numpy parses its header with ast, whose depth counter the threads of CPython 3.11 share: two at
#: once can end with a SystemError.
_PARSING = threading.Lock()
#: Bytes of llm.c's header. Its magic number and version → type of the tokens (its
#: dev/data/data_common.py).
_LLMC_HEAD = 1024
_LLMC = {(20240520, 1): "uint16", (20240801, 7): "uint32"}

#: Most files that are looked at to find their type, of those behind URLs, and bytes of each.
_FILES = 64
_REMOTE_FILES = 8
_PIECE = 1 << 15
#: Types for ids, the narrowest first.
_TYPES = ("uint16", "uint32", "uint64")


class Header(NamedTuple):
    """What a file tells of itself.

    dtype: None where nothing tells it. tokens: None: to the end of the file. leads: an id between
    documents is the first of its document.
    """

    dtype: str | None = None
    first_byte: int = 0
    tokens: int | None = None
    leads: bool = False


def read_header(file: ByteFile) -> Header:
    """Return what a file tells of its tokens.

    Raises DataError, naming the file, for one that is empty, cut, or holds no ids.
    """
    head = file.read(0, _HEAD)
    if not head:
        raise DataError(f"{file.name} is empty; copy it again, or remove it")
    if head.startswith(_NUMPY):
        header = _of_numpy(file.name, head)
    else:
        magic, version, tokens = np.frombuffer(head.ljust(12, b"\0"), "<i4", 3).tolist()
        dtype = _LLMC.get((magic, version))
        if dtype is None:
            return Header()
        header = Header(dtype, _LLMC_HEAD, tokens, leads=True)
    assert header.tokens is not None
    size = header.first_byte + header.tokens * np.dtype(header.dtype).itemsize
    if file.size != size:
        raise DataError(
            f"{file.name} has {file.size:,} bytes instead of {size:,} for {header.tokens:,} tokens "
            f"of {np.dtype(header.dtype)}; copy it again"
        )
    return header


def _of_numpy(name: str, head: bytes) -> Header:
    stream = io.BytesIO(head)
    try:
        major, _ = np.lib.format.read_magic(stream)
        read = getattr(np.lib.format, f"read_array_header_{major}_0")
        with _PARSING:
            shape, _, dtype = read(stream)
    except (ValueError, EOFError, AttributeError) as error:
        raise DataError(f"{name}: no array of numpy: {error}") from None
    if len(shape) != 1 or dtype.kind not in "ui":
        raise DataError(
            f"{name}: expected one row of whole numbers, found {dtype} of shape {shape}"
        )
    return Header(dtype.str, stream.tell(), shape[0])


# The type that no header tells


def guess_type(files: Sequence[ByteFile], tokenizer_size: int, vocab_size: int, key: str) -> str:
    """Return the type of ids in files without a header: the narrowest for the tokenizer's.

    key: of the config, that gives the type. vocab_size: of the model. Raises DataError where a
    wider type fits too: tokens of 4 bytes, read as 2, are ids and zeros.
    """
    expected = "uint16" if tokenizer_size <= 1 << 16 else "uint32"
    wider = _TYPES[_TYPES.index(expected) + 1 :]
    most = _REMOTE_FILES if files[0].is_remote else _FILES
    for number in np.unique(np.linspace(0, len(files) - 1, most).astype(np.int64)):
        file = files[number]
        fitting = [name for name in wider if _fits(file, name, vocab_size)]
        if fitting:
            raise DataError(
                f"{key}: {file.name} has no header, and its ids could be {expected} or "
                f'{" and ".join(fitting)}. Say which: {key} = "{fitting[0]}" (or "{expected}")'
            )
    return expected


def _fits(file: ByteFile, type_name: str, vocab_size: int) -> bool:
    """Whether pieces of a file are ids of a type."""
    dtype = np.dtype(type_name)
    if file.size % dtype.itemsize:
        return False
    return all((np.frombuffer(piece, dtype) < vocab_size).all() for piece in _pieces(file))


def _pieces(file: ByteFile) -> Iterator[bytes]:
    """Yield the beginning, the middle and the end of a file; all of them are of any type."""
    last = max(file.size - _PIECE, 0) // 8 * 8
    for begin in dict.fromkeys((0, last // 16 * 8, last)):
        yield file.read(begin, _PIECE)


def check_size(file: ByteFile, type_name: str, key: str) -> None:
    """Raise DataError for a file whose size is no whole number of ids."""
    item = np.dtype(type_name).itemsize
    if file.size % item:
        raise DataError(
            f"{file.name} has {file.size:,} bytes, which are no whole number of ids of "
            f"{item} bytes ({type_name}). It was cut, or {key} must name another type"
        )
