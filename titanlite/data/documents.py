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
    last target. source: name of a single text.
    """
    source, text, number = rows.text_at(index, source)
    found: list[Document] = []
    left = rows.seq_len
    for name, tokens in text.documents_in(number):
        file, record = text.place_of(name) or (None, None)
        found.append(Document(source, str(name), file, record, min(tokens, left)))
        left -= found[-1].tokens
    return found
