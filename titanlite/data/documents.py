"""The documents of a row: where they are from, and how many tokens of each it has."""

from __future__ import annotations

from typing import NamedTuple

from titanlite.data.rows import Rows


class Document(NamedTuple):
    """Neighbouring tokens of one document in a row.

    `name` is its number, from 0 in file order; of a stream, its file and record. `file` and
    `record`, from 1, are known for streams and prepared text.
    """

    source: str
    name: str
    file: str | None
    record: int | None
    tokens: int


def documents_of(rows: Rows, index: int, source: str) -> list[Document]:
    """Return the documents of row `index`; the last may have only its last target."""
    source, text, number = rows.text_at(index, source)
    found: list[Document] = []
    left = rows.seq_len
    for name, tokens in text.documents_in(number):
        file, record = text.place_of(name) or (None, None)
        found.append(Document(source, str(name), file, record, min(tokens, left)))
        left -= found[-1].tokens
    return found
