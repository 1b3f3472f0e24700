"""One file of tokens, mapped into memory when it is first read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from titanlite.data.token_integrity import check_offsets
from titanlite.data.tokenize_files import DocumentArray

#: Part of the fingerprint of token files. Change it with anything that changes their rows.
ORDER = "windows of the stream of tokens, order 1"


class SourceSpan(NamedTuple):
    """Neighbouring documents of a part from one source."""

    #: File of the text.
    file: str
    #: Number of the first document, within the part and within the source.
    first: int
    record: int


@dataclass
class Part(DocumentArray):
    """A file of `size` tokens, of a prepared folder unless a subclass says otherwise.

    `tokens` [size] are plain arrays over the maps, as slices of a memmap are slower. `offsets` are
    [documents + 1].
    """

    file: Path
    dtype: np.dtype[Any]
    size: int
    first_byte: int = 0
    has_targets: bool = False
    sources: Sequence[SourceSpan] = ()
    remedy: str = ""

    @property
    def documents(self) -> int:
        return len(self.offsets) - 1

    @cached_property
    def tokens(self) -> NDArray[Any]:  # type: ignore[override]
        return map_array(self.file, self.dtype, self.size, self.first_byte)

    @cached_property
    def offsets(self) -> NDArray[np.int64]:  # type: ignore[override]
        return self.find_offsets()

    def find_offsets(self) -> NDArray[np.int64]:
        """Return where documents begin, and the end [documents + 1]."""
        file = self.file.with_suffix(".offsets")
        return map_array(file, "<i8", file.stat().st_size // 8)

    def check_offsets(self) -> None:
        """Raise DataError unless documents follow each other."""
        check_offsets(self.file.with_suffix(".offsets"), self.find_offsets(), self.size)

    @cached_property
    def _target_bits(self) -> NDArray[Any]:
        return map_array(self.file.with_suffix(".targets"), "u1", -(-self.size // 8))

    def is_target(self, begin: int, end: int) -> NDArray[np.bool_]:
        if not self.has_targets:
            return np.ones(end - begin, dtype=bool)
        first_byte = begin // 8
        bits = np.unpackbits(self._target_bits[first_byte : -(-end // 8)], bitorder="little")
        first = begin - 8 * first_byte
        return bits[first : first + end - begin].astype(bool)


def map_array(file: Path, dtype: Any, count: int, first_byte: int = 0) -> NDArray[Any]:
    """Map `count` numbers of a file into memory."""
    if count == 0:
        return np.zeros(0, dtype)
    mapped = np.memmap(file, dtype=dtype, mode="r", offset=first_byte, shape=(count,))
    return mapped.view(np.ndarray)
