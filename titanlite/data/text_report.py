"""The text that was opened: its files, skipped files, passes over it, and checks of tokens."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from titanlite.data.listing import Listing
from titanlite.data.rows import Rows
from titanlite.data.text_check import passes_warning

if TYPE_CHECKING:
    from titanlite.data.token_checks import HashCheck


def sources_of(rows: Rows, name: str) -> dict[str, Rows]:
    """Return the sources of a mixture by name; a single text under `name`."""
    mixture = rows.mixture
    if mixture is None:
        return {name: rows}
    return dict(zip(mixture.names, mixture.rows, strict=True))


def checks_of(texts: Iterable[Rows]) -> list[HashCheck]:
    """Return the checks of the prepared token files among some texts."""
    found = []
    for rows in texts:
        for one in sources_of(rows, "").values():
            if one.corpus is not None and one.corpus.check is not None:
                found.append(one.corpus.check)
    return found


def listings_of(rows: Rows) -> dict[str, Listing]:
    """Return how the files of each source of a mixture were found.

    The key of a single text is "". Text without files gives {}.
    """
    listings = {name: one.listing for name, one in sources_of(rows, "").items()}
    return {name: listing for name, listing in listings.items() if listing is not None}


def file_lines(rows: Rows, label: str = "") -> Iterator[str]:
    """Yield a line for the files of each source. label: goes before the name of a source."""
    for name, listing in listings_of(rows).items():
        title = _title(label, name)
        yield f"{title}: {listing.describe()}" if title else listing.describe()


def file_warnings(rows: Rows, label: str) -> Iterator[str]:
    """Yield a warning for each pattern that finds files of several splits. label: of the text."""
    for name, listing in listings_of(rows).items():
        warning = listing.warning()
        if warning:
            yield f"{_title(label, name)}: {warning}"


def _title(label: str, name: str) -> str:
    return f"{label} {name}".strip()


def pass_warnings(rows: Rows, name: str, sequences: int) -> Iterator[str]:
    """Yield a warning for each text that a run of this many sequences reads too often.

    name: of a single text.
    """
    served: Mapping[str, int] = {name: sequences}
    if rows.mixture is not None:
        served = rows.mixture.served(sequences)
    for source, one in sources_of(rows, name).items():
        length = one.sequences_per_epoch
        if not length:
            continue
        warning = passes_warning(source, served[source] / length)
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
