"""The text that was opened: its files, skipped files, passes over it, and checks of tokens."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from titanlite.data.rows import Rows

if TYPE_CHECKING:
    from titanlite.data.token_integrity import HashCheck

#: Passes over a text after which another one teaches a model little (docs/data.md).
_MOST_PASSES = 8


def checks_of(texts: Iterable[Rows]) -> list[HashCheck]:
    """Return the checks of the prepared token files among some texts."""
    found = []
    for rows in texts:
        for one in rows.texts().values():
            if one.corpus is not None and one.corpus.check is not None:
                found.append(one.corpus.check)
    return found


def file_lines(rows: Rows, name: str = "") -> Iterator[str]:
    """Yield a line for the files of each text."""
    for title, text in rows.texts(name).items():
        if text.listing is not None:
            line = text.listing.describe()
            yield f"{title}: {line}" if title else line


def file_warnings(rows: Rows, name: str) -> Iterator[str]:
    """Yield a warning for each pattern that finds files of several splits."""
    for title, text in rows.texts(name).items():
        warning = "" if text.listing is None else text.listing.warning()
        if warning:
            yield f"{title}: {warning}"


def pass_warnings(rows: Rows, name: str, sequences: int) -> Iterator[str]:
    """Yield a warning for each text that so many sequences read too often."""
    served = rows.served(sequences, name)
    for source, one in rows.texts(name).items():
        passes = served[source] / (one.sequences_per_epoch or math.inf)
        if passes > _MOST_PASSES:
            yield (
                f"{source}: the run reads this text {passes:.3g} times. More than {_MOST_PASSES} "
                "passes teach a model little and it begins to repeat the text: take more text, or "
                "fewer steps"
            )
