"""The text that was opened: its files, those passed over, how often it is read, and the checks of
its tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from titanlite.data.listing import Listing
from titanlite.data.mixture import MixedRows
from titanlite.data.rows import Rows
from titanlite.data.text_check import passes_warning
from titanlite.data.token_checks import HashCheck
from titanlite.data.token_files import TokenFiles


def listings_of(rows: Rows) -> dict[str, Listing]:
    """Return what was found for each source of a mixture, or under "" for one text; {} for text
    without files.
    """
    found = {name: getattr(one, "listing", None) for name, one in _sources(rows, "").items()}
    return {name: listing for name, listing in found.items() if listing is not None}


def _sources(rows: Rows, name: str) -> dict[str, Rows]:
    """Return the sources of a mixture by name; other rows under `name`."""
    return (
        dict(zip(rows.names, rows.rows, strict=True))
        if isinstance(rows, MixedRows)
        else {name: rows}
    )


def checks_of(texts: Iterable[Rows]) -> list[HashCheck]:
    """Return the checks of the prepared token files among some texts."""
    found = []
    for rows in texts:
        for one in _sources(rows, "").values():
            corpus = getattr(one, "corpus", None)
            if isinstance(corpus, TokenFiles) and corpus.check is not None:
                found.append(corpus.check)
    return found


def file_lines(rows: Rows, label: str = "") -> Iterator[str]:
    """Yield a line for the files of each source. label: goes before the name of a source."""
    for name, listing in listings_of(rows).items():
        title = " ".join(filter(None, (label, name)))
        yield f"{title}: {listing.describe()}" if title else listing.describe()


def file_warnings(rows: Rows, label: str) -> Iterator[str]:
    """Yield a warning for each pattern that finds files of several splits. label: of the text."""
    for name, listing in listings_of(rows).items():
        if warning := listing.warning():
            yield f"{' '.join(filter(None, (label, name)))}: {warning}"


def pass_warnings(rows: Rows, name: str, sequences: int) -> Iterator[str]:
    """Yield a warning for each text that a run of so many sequences reads too often.

    name: of a single text.
    """
    served: Mapping[str, int] = {name: sequences}
    if isinstance(rows, MixedRows):
        served = rows.served(sequences)
    for source, one in _sources(rows, name).items():
        length = getattr(one, "sequences_per_epoch", None)
        warning = passes_warning(source, served[source] / length) if length else None
        if warning:
            yield warning


def listing_figures(listing: Listing | None) -> dict[str, Any]:
    """Return the figures of `titanlite data stats` about files: None where there are none
    to list.
    """
    if listing is None:
        return {"files": None, "passed_over": None}
    passed = {reason: list(names) for reason, names in listing.passed_over.items()}
    return {"files": dict(listing.kinds), "passed_over": passed}
