"""The documents of a row: where they are from, and how many tokens of each it has."""

from __future__ import annotations

from typing import NamedTuple

from titanlite.data.rows import Rows


class Document(NamedTuple):
    """Neighbouring tokens of one document in a row.

    `source`: its name in a mixture, else that of the text. `name`: the document's number, from 0 in
    the order of the files; of a stream its file and record. `file` and `record`, from 1: of streams
    and of prepared text.
    """

    source: str
    name: str
    file: str | None
    record: int | None
    tokens: int


def documents_of(rows: Rows, index: int, source: str) -> list[Document]:
    """Return the documents of row `index`, in its order; the last may have no token but the row's
    last target.
    """
    mixture = rows.mixture
    if mixture is not None:
        number, index = mixture.locate(index)
        return documents_of(mixture.rows[number], index, mixture.names[number])
    found: list[Document] = []
    left = rows.seq_len
    for name, tokens in rows.documents_in(index):
        file, record = rows.place_of(name) or (None, None)
        found.append(Document(source, str(name), file, record, min(tokens, left)))
        left -= found[-1].tokens
    return found
