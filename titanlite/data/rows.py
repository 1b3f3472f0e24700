"""Training sequences by their number: the interface between text and loaders."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

#: Label of a position that is no target.
IGNORE = -100


def max_documents(seq_len: int) -> int:
    """Return the most documents of a row that attention keeps apart on GPUs, padding included."""
    return max(64, seq_len // 64)


class Row(NamedTuple):
    """One sequence.

    `tokens`: [seq_len] int64; `labels`: [seq_len] int64, shifted by one, `IGNORE` where there is no
    target; `documents`: [seq_len] int32, the number of each token's document within the row, from
    0; None where attention does not stop at documents.
    """

    tokens: NDArray[np.int64]
    labels: NDArray[np.int64]
    documents: NDArray[np.int32] | None = None


class Rows(Protocol):
    """The sequences of a run in one global order, which does not depend on the number of ranks.

    `settings` and `fingerprint` (a hex digest of the text) decide row i. `total_sequences` is None
    without an end.
    """

    seq_len: int

    @property
    def total_sequences(self) -> int | None: ...

    @property
    def fingerprint(self) -> str: ...

    @property
    def settings(self) -> dict[str, Any]: ...

    @property
    def tokens_per_epoch(self) -> int | None:
        """Tokens of one pass; None if they are not known."""
        ...

    def describe(self) -> str:
        """Return the size of the text in words."""
        ...

    def sequence(self, index: int) -> Row:
        """Return row `index`. Raises EndOfData for an index at or above `total_sequences`."""
        ...

    def padding(self) -> Row:
        """Return a row without targets, to fill up the last batch of finite data."""
        ...

    def documents_in(self, index: int) -> Sequence[tuple[Any, int]]:
        """Return what names each document of row `index`, and its tokens there; the row's last
        target counts too.
        """
        ...

    def state_dict(self) -> dict[str, Any]:
        """Return what this rank must know, besides the number of the next row, to go on; {} if
        nothing.
        """
        ...

    def merge_states(self, states: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """Return the states of all ranks as one."""
        ...

    def load_state_dict(
        self,
        state: dict[str, Any],
        position: int = 0,
        phases: Mapping[int, Mapping[str, float]] | None = None,
    ) -> None:
        """Go on with row `position`, from the state of all ranks; {}: from the start.

        phases: first row → shares of the sources of a mixture from there on.
        """
        ...


class Stateless:
    """Rows that are a function of their number alone."""

    def state_dict(self) -> dict[str, Any]:
        return {}

    def merge_states(self, states: Sequence[dict[str, Any]]) -> dict[str, Any]:
        return {}

    def load_state_dict(
        self,
        state: dict[str, Any],
        position: int = 0,
        phases: Mapping[int, Mapping[str, float]] | None = None,
    ) -> None:
        pass
