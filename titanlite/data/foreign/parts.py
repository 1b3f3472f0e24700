"""A file of another program as a part of a corpus of tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from titanlite.data.foreign.cuts import Cut
from titanlite.data.foreign.ranges import ByteFile, Numbers, RemoteNumbers
from titanlite.data.token_checks import check_offsets
from titanlite.data.token_parts import TokenPart


@dataclass
class ForeignPart(TokenPart):
    """One file of `size` tokens, which begin at `first_byte`.

    `cut`: tells documents apart where no index does. `index`: datatrove's, the end of each document
    (uint64). `loss`: datatrove's, a byte per token, 0 where it is no target. `remedy`: see
    `TokenPart`.
    """

    file: ByteFile
    dtype: np.dtype[Any]
    size: int
    first_byte: int
    cut: Cut
    index: ByteFile | None = None
    loss: ByteFile | None = None
    remedy: str = ""

    def __post_init__(self) -> None:
        self.has_targets = self.loss is not None

    @property
    def name(self) -> str:
        return self.file.name

    @property
    def is_remote(self) -> bool:
        return self.file.is_remote

    @property
    def is_counted(self) -> bool:
        return self.index is not None or "offsets" in self.__dict__

    @cached_property
    def documents(self) -> int:  # type: ignore[override]
        if self.index is not None:
            return self.index.size // 8
        return len(self.offsets) - 1

    @cached_property
    def tokens(self) -> Numbers:  # type: ignore[override]
        return self.file.numbers(self.dtype, self.size, self.first_byte)

    @cached_property
    def offsets(self) -> NDArray[np.int64]:  # type: ignore[override]
        return self.find_offsets()

    def find_offsets(self) -> NDArray[np.int64]:
        """Read the index, or all tokens; return where documents begin, and the end [documents + 1].

        Raises DataError for an index that goes back.
        """
        if self.index is None:
            return self.cut.offsets(self.tokens, self.size, self.name)
        ends = self.index.numbers("<u8", self.documents)[0 : self.documents]
        offsets = np.concatenate([np.zeros(1, np.int64), ends.astype(np.int64)])
        check_offsets(self.index.name, offsets, self.size, "copy it again")
        return offsets

    def begins_in(self, begin: int, end: int) -> NDArray[np.int64]:
        """Return the first token in [begin, end) of each document there.

        Ids tell it from these tokens alone.
        """
        if self.index is None:
            return self.cut.begins_in(self.tokens, begin, end)
        return super().begins_in(begin, end)

    def prepare(self, spans: Sequence[tuple[int, int]], targets: bool) -> None:
        """Fetch tokens [begin, end) of each span, if they are behind a URL."""
        if isinstance(self.tokens, RemoteNumbers):
            self.tokens.prepare(spans)
        if targets and self.loss is not None and isinstance(self._loss, RemoteNumbers):
            self._loss.prepare(spans)

    @cached_property
    def _loss(self) -> Numbers:
        assert self.loss is not None
        return self.loss.numbers("u1", self.size)

    def is_target(self, begin: int, end: int) -> NDArray[np.bool_]:
        """Return whether tokens [begin, end) are targets."""
        if self.loss is None:
            return super().is_target(begin, end)
        return self._loss[begin:end].astype(bool)
