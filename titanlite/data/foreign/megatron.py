"""Megatron-LM's pairs of token files, `.bin` and `.idx`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from titanlite.data import DataError
from titanlite.data.mapped_tokens import Part, map_array
from titanlite.data.token_paths import pair_of

#: Places of Megatron's sequences that are compared at the start.
_PIECES = 256
#: Head of Megatron's index, the last two numbers are of sequences and of documents + 1.
_HEAD = np.dtype(
    [("magic", "S9"), ("version", "<u8"), ("code", "u1"), ("sequences", "<u8"), ("bounds", "<u8")]
)
#: Types by their codes there.
_DTYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}


class _Index(NamedTuple):
    """Length in tokens and first byte of each sequence.

    `documents` has the sequences at which documents begin, with an end.
    """

    file: Path
    dtype: np.dtype[Any]
    lengths: NDArray[np.int32]
    positions: NDArray[np.int64]
    documents: NDArray[np.int64]


@dataclass
class _MegatronPart(Part):
    index: _Index = None  # type: ignore[assignment]

    def find_offsets(self) -> NDArray[np.int64]:
        if not len(self.index.documents):
            return np.zeros(1, np.int64)
        item = self.dtype.itemsize
        begins = np.append(self.index.positions, self.size * item)[self.index.documents]
        return begins // item


def megatron_part(name: Path) -> Part:
    """Open a pair of files (Megatron-LM's megatron/core/datasets/indexed_dataset.py).

    Sequences must lie end to end. Raises DataError for damaged files, OSError for unreadable ones.
    """
    file, index_file = pair_of(name)
    index = _read_index(index_file)
    lengths, positions, documents = index.lengths, index.positions, index.documents
    end = file.stat().st_size
    item = index.dtype.itemsize
    count = len(lengths)
    if count:
        some = np.unique(np.linspace(0, count - 1, _PIECES).astype(np.int64))
        following = positions[np.minimum(some + 1, count - 1)]
        after = np.where(some < count - 1, following, end)
        found = positions[some] + lengths[some] * np.int64(item)
        if positions[0] != 0 or (found != after).any():
            raise DataError(f"{index_file}: the sequences do not lie end to end in {file.name}")
    bounds = np.concatenate([[0], documents, [count]])
    if (np.diff(bounds) < 0).any():
        raise DataError(
            f"{index_file} is damaged: its documents are not in the order of its "
            f"{count:,} sequences"
        )
    return _MegatronPart(file, index.dtype, end // item, index=index)


def _read_index(file: Path) -> _Index:
    """Map an index: a head, then the sequences' int32 lengths and int64 byte positions.

    Then come int64 numbers of the sequences at which documents begin.
    """
    head = np.fromfile(file, _HEAD, 1)
    if not len(head) or head["magic"][0] != b"MMIDIDX":
        raise DataError(f"{file}: no index of Megatron-LM")
    _, version, code, count, bounds = head[0].tolist()
    if version != 1 or code not in _DTYPES:
        raise DataError(
            f"{file}: version {version} with type {code} is not known; expected version 1"
        )
    begin = _HEAD.itemsize
    size = begin + 12 * count + 8 * bounds
    found = file.stat().st_size
    # Multimodal data have a byte more per sequence.
    if found not in (size, size + count):
        raise DataError(f"{file} has {found:,} bytes instead of {size:,}; copy the file again")
    return _Index(
        file=file,
        dtype=np.dtype(_DTYPES[code]),
        lengths=map_array(file, "<i4", count, begin),
        positions=map_array(file, "<i8", count, begin + 4 * count),
        documents=map_array(file, "<i8", bounds, begin + 12 * count),
    )
