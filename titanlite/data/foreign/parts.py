"""A file of another program as a part of a corpus of tokens, and where its documents begin.

Most tools end a document with EOS (nanoGPT, Dolma). llm.c begins each with its end-of-text id. The
first token of the first file tells which: BOS or EOS there leads its document.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from titanlite.data.foreign.ranges import ByteFile, Numbers, RemoteNumbers
from titanlite.data.token_parts import TokenPart
from titanlite.data.tokenizer import Tokenizer
from titanlite.utils import logger, progress_text

#: Tokens that are looked at together.
_TOKENS = 1 << 22
#: Seconds between two lines of progress.
_REPORT_SECONDS = 10.0


class Cut(NamedTuple):
    """The id between documents, and whether it is a document's first token or its last one."""

    id: int
    leads: bool

    def __str__(self) -> str:
        return f"{'before' if self.leads else 'after'} id {self.id}"

    def begins_in(self, tokens: Numbers, begin: int, end: int) -> NDArray[np.int64]:
        """Return where documents begin in tokens [begin, end); the first is `begin`."""
        return np.concatenate([[begin], self._inner(tokens, begin, end)])

    def offsets(self, tokens: Numbers, size: int, name: str) -> NDArray[np.int64]:
        """Read all tokens; return where documents begin, and the end [documents + 1].

        A file begins a document, and its end ends one. name: of the file, for lines of progress.
        """
        if not size:
            return np.zeros(1, np.int64)
        found = [np.zeros(1, np.int64), *self._all(tokens, size, name)]
        return np.concatenate([*found, [size]])

    def _all(self, tokens: Numbers, size: int, name: str) -> Iterator[NDArray[np.int64]]:
        began = reported = time.monotonic()
        for begin in range(0, size, _TOKENS):
            # The first token of each group is looked at with the group before.
            end = min(begin + _TOKENS + 1, size)
            yield self._inner(tokens, begin, end)
            now = time.monotonic()
            if now - reported > _REPORT_SECONDS:
                reported = now
                share = progress_text(end, size, now - began)
                logger.info(f"looking for documents in {name}: {share}")

    def _inner(self, tokens: Numbers, begin: int, end: int) -> NDArray[np.int64]:
        """Return where documents begin in (begin, end)."""
        first = begin + 1 if self.leads else begin
        last = end if self.leads else end - 1
        piece = tokens[first:last]
        return np.flatnonzero(piece == self.id) + (begin + 1)


def find_cut(first_tokens: NDArray[Any], tokenizer: Tokenizer, has_leading_ids: bool) -> Cut:
    """Return where documents are cut, from the first tokens of the first file.

    has_leading_ids: the file is of a program whose documents begin with such an id.
    """
    ends = (tokenizer.bos_id, tokenizer.eos_id)
    if len(first_tokens) and int(first_tokens[0]) in ends:
        return Cut(int(first_tokens[0]), leads=True)
    if not has_leading_ids:
        return Cut(tokenizer.eos_id, leads=False)
    has_bos = bool((first_tokens == tokenizer.bos_id).any())
    return Cut(tokenizer.bos_id if has_bos else tokenizer.eos_id, leads=True)


@dataclass
class ForeignPart(TokenPart):
    """One file of `size` tokens, which begin at `first_byte`; `cut` tells its documents apart.

    `remedy`: see `TokenPart`.
    """

    file: ByteFile
    dtype: np.dtype[Any]
    size: int
    first_byte: int
    cut: Cut
    remedy: str = ""

    @property
    def name(self) -> str:
        return self.file.name

    @property
    def is_remote(self) -> bool:
        return self.file.is_remote

    @property
    def is_counted(self) -> bool:
        return "offsets" in self.__dict__

    @property
    def documents(self) -> int:  # type: ignore[override]
        return len(self.offsets) - 1

    @cached_property
    def tokens(self) -> Numbers:  # type: ignore[override]
        return self.file.numbers(self.dtype, self.size, self.first_byte)

    @cached_property
    def offsets(self) -> NDArray[np.int64]:  # type: ignore[override]
        """Read all tokens; see `Cut.offsets`."""
        return self.cut.offsets(self.tokens, self.size, self.name)

    def begins_in(self, begin: int, end: int) -> NDArray[np.int64]:
        """Return the first token in [begin, end) of each document there; these tokens tell it."""
        return self.cut.begins_in(self.tokens, begin, end)

    def prepare(self, spans: Sequence[tuple[int, int]]) -> None:
        """Fetch tokens [begin, end) of each span, if they are behind a URL."""
        if isinstance(self.tokens, RemoteNumbers):
            self.tokens.prepare(spans)
