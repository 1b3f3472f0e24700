"""The type of ids in files that do not tell it: that of the vocabulary, if it is the only one that
fits.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from titanlite.data import DataError
from titanlite.data.foreign.ranges import ByteFile

#: Places of all files, and beginnings of files, that are looked at; of those behind URLs; and bytes
#: at each.
_PIECES = 64
_REMOTE_PIECES = 8
_PIECE = 1 << 15
#: Types for ids, the narrowest first.
_TYPES = ("uint16", "uint32", "uint64")


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
