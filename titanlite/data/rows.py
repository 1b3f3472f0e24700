"""Training sequences by their number: the interface between text and loaders.

`titanlite.data.sequences` has those of a text that is at hand.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from titanlite.data.file_stamps import FileStamps
    from titanlite.data.listing import Listing
    from titanlite.data.step_sizes import Course
    from titanlite.data.tokenize_files import Tokens

#: Label of a position that is no target.
IGNORE = -100


def max_documents(seq_len: int) -> int:
    """Return the most documents of a row for attention on GPUs, padding included."""
    return max(64, seq_len // 64)


class Row(NamedTuple):
    """One sequence of `tokens` and `labels`, [seq_len] int64 each.

    Labels are shifted by one, `IGNORE` without a target. `documents` [seq_len] int32 number each
    token's document in the row, from 0; None if attention does not stop at documents.
    """

    tokens: NDArray[np.int64]
    labels: NDArray[np.int64]
    documents: NDArray[np.int32] | None = None


class Window(NamedTuple):
    """Tokens of a row, and the target of the last of them if there is one."""

    ids: NDArray[Any]
    #: True for each token that the loss counts; None: all.
    targets: NDArray[np.bool_] | None = None
    #: Positions at which documents begin.
    begins: Sequence[int] | NDArray[np.int64] = (0,)


def make_row(windows: Iterable[Window], seq_len: int, pad_id: int, mask_documents: bool) -> Row:
    """Return a row of windows side by side, filled up with padding.

    A token predicts the next one of its window; with `mask_documents` of its document.
    """
    tokens = np.full(seq_len, pad_id, dtype=np.int64)
    labels = np.full(seq_len, IGNORE, dtype=np.int64)
    # 1 where a document begins, with a place behind the row.
    begins = np.zeros(seq_len + 1, dtype=np.int32)
    at = 0
    for ids, targets, starts in windows:
        tokens[at : at + len(ids)] = ids[: seq_len - at]
        following = labels[at : at + len(ids) - 1]
        following[:] = ids[1:]
        if targets is not None:
            following[~targets[1:]] = IGNORE
        begins[np.asarray(starts) + at] = 1
        at += len(ids)
    if not mask_documents:
        return Row(tokens, labels)
    begins[0] = 0
    # Padding counts as one more document.
    begins[at : at + 1] = at > 0
    documents = np.cumsum(begins, dtype=np.int32)
    labels[documents[1:] != documents[:-1]] = IGNORE
    return Row(tokens, labels, documents[:-1])


class FilePlace(NamedTuple):
    """A document's file, and its record's number there, from 1."""

    file: str
    record: int


class Rows(ABC):
    """The sequences of a run in one global order, which does not depend on the number of ranks.

    `settings` and `fingerprint` (a hex digest of the text) decide row i.
    """

    seq_len: int
    #: How the files of a single text were found, for reports.
    listing: Listing | None = None
    #: Stamps that tell its files from others that take their place; None: not known.
    stamps: FileStamps | None = None
    #: The tokens of a single text that is held as a whole.
    corpus: Tokens | None = None
    #: Parts of a stream, of which each rank reads its own alone; None: any rank can read any row.
    lanes: int | None = None
    #: Their end, if they have one, is that of the run; False: the run has its own length.
    sets_length: bool = True
    #: The latest state was saved with other sources or shares than hold from its position on.
    changed: bool = False

    @property
    @abstractmethod
    def total_sequences(self) -> int | None:
        """Rows of all epochs; None without an end."""

    @property
    @abstractmethod
    def fingerprint(self) -> str: ...

    @property
    @abstractmethod
    def settings(self) -> dict[str, Any]: ...

    @property
    def tokens_per_epoch(self) -> int | None:
        """Tokens of one pass, if known."""
        return None

    @property
    def sequences_per_epoch(self) -> int | None:
        """Rows of one pass, if known."""
        return None

    @property
    def shares(self) -> dict[str, float]:
        """Shares of the rows at the start, by source; {} for a single text."""
        return {}

    def texts(self, name: str = "") -> dict[str, Rows]:
        """Return the texts by name; here and below `name` is that of a single text."""
        return {name: self}

    def text_at(self, index: int, name: str = "") -> tuple[str, Rows, int]:
        """Return the name and the rows of row `index`'s text, and its number there."""
        return name, self, index

    def served(self, index: int, name: str = "") -> dict[str, int]:
        """Return how many rows before `index` each text has, by name."""
        return {name: index}

    def check_length(self, course: Course, steps: int) -> None:
        """Raise DataError if the rows end before a run of so many steps."""
        # A single text that has an end sets the length itself.
        return

    @abstractmethod
    def describe(self) -> str:
        """Return the size of the text in words."""

    @abstractmethod
    def sequence(self, index: int) -> Row:
        """Return row `index`. Raises EndOfData for an index at or above `total_sequences`."""

    @abstractmethod
    def padding(self) -> Row:
        """Return a row without targets, to fill up the last batch of finite data."""

    @abstractmethod
    def documents_in(self, index: int) -> Sequence[tuple[Any, int]]:
        """Return what names each document of row `index`, and its tokens, the last target
        included.
        """

    def place_of(self, document: Any) -> FilePlace | None:
        """Return where a document of `documents_in` is from, if that is kept."""
        return None

    def state_dict(self) -> dict[str, Any]:
        """Return what this rank must know, besides the next row's number, to continue; {} if
        nothing.
        """
        return {}

    def merge_states(self, states: Sequence[dict[str, Any]]) -> dict[str, Any]:
        return {}

    def load_state_dict(
        self,
        state: dict[str, Any],
        position: int = 0,
        phases: Mapping[int, Mapping[str, float]] | None = None,
    ) -> None:
        """Continue with row `position`, from the state of all ranks; {} is the start.

        `phases` has a mixture's shares by first row.
        """
        # Rows that are a function of their number alone have nothing to load.
        return
