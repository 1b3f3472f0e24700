"""What the first bytes of a token file, and the small files beside it, tell.

| form | told by | tells |
|---|---|---|
| numpy | its magic bytes | type and number of tokens |
| llm.c, modded-nanogpt | 256 int32, first 20240520 (GPT-2) or 20240801 (Llama 3) | the same |
| datatrove | the name `.ds`; `.ds.metadata` and `.ds.index` beside it | the same, and documents |
| raw | nothing: the whole file is ids (Dolma's `.npy`, nanoGPT's `.bin`) | |
"""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import numpy as np

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
    """Return what the files beside a `.ds` file tell: its metadata, else its index."""
    index = beside(".index")
    end = None
    if index is not None:
        end = _last_end(index)
    metadata = beside(".metadata")
    if metadata is not None:
        header = _of_metadata(file, metadata)
    elif end and file.size in (2 * end, 4 * end):
        return Header(DATATROVE, f"uint{file.size // end * 8}", 0, end)
    elif index is None:
        return Header(DATATROVE, None)
    else:
        raise DataError(
            f"{index.name} ends at token {end:,}, and {file.name} has {file.size:,} bytes: neither "
            "2 nor 4 for a token; copy both again"
        )
    if index is not None and end != header.tokens:
        raise DataError(
            f"{index.name} ends at token {end:,}, and {file.name} has {header.tokens:,}; copy both "
            "again"
        )
    return header


def _of_metadata(file: ByteFile, metadata: ByteFile) -> Header:
    """Return what datatrove's metadata tell: `tokenizer|bytes of a token`, tokens, a rounded
    size.
    """
    lines = metadata.read(0, _HEAD).decode("utf-8", "replace").splitlines()
    try:
        item = int(lines[0].rpartition("|")[2])
        tokens = int(lines[1])
    except (LookupError, ValueError):
        raise DataError(
            f"{metadata.name}: no metadata of datatrove, whose first line ends with |2 or |4"
        ) from None
    if item not in (2, 4):
        raise DataError(f"{metadata.name}: tokens of {item} bytes are not known; 2 or 4 are")
    header = Header(DATATROVE, f"uint{8 * item}", 0, tokens)
    _check_size(file, header, np.dtype(f"u{item}"))
    return header


def _last_end(index: ByteFile) -> int:
    """Return the last number of datatrove's index, the end of its last document."""
    if index.size % 8:
        raise DataError(f"{index.name} has {index.size:,} bytes, no multiple of 8; copy it again")
    if not index.size:
        return 0
    return int(np.frombuffer(index.read(index.size - 8, 8), "<u8")[0])


def _check_size(file: ByteFile, header: Header, dtype: np.dtype[Any]) -> None:
    """Raise DataError unless the file holds the tokens that its header tells."""
    assert header.tokens is not None
    size = header.first_byte + header.tokens * dtype.itemsize
    if file.size != size:
        raise DataError(
            f"{file.name} has {file.size:,} bytes instead of {size:,} for {header.tokens:,} tokens "
            f"of {dtype}; copy it again"
        )
