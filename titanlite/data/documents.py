"""The documents of a row: where they are from, and how many tokens of each it has."""

from __future__ import annotations

from typing import NamedTuple

from titanlite.data.mixture import MixedRows
from titanlite.data.packing import PackedDataset
from titanlite.data.rows import Rows
from titanlite.data.stream import StreamRows
from titanlite.data.token_files import TokenFiles


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


def is_streamed(rows: Rows) -> bool:
    """Whether a rank reads its own part of the text alone."""
    return (
        isinstance(rows, StreamRows)
        or isinstance(rows, MixedRows)
        and any(map(is_streamed, rows.rows))
    )


def documents_of(rows: Rows, index: int, source: str) -> list[Document]:
    """Return the documents of row `index`, in its order; the last may have no token but the row's
    last target.
    """
    if isinstance(rows, MixedRows):
        number, index = rows.locate(index)
        return documents_of(rows.rows[number], index, rows.names[number])
    found, left = [], rows.seq_len
    for name, tokens in rows.documents_in(index):
        file, record = None, None
        if isinstance(rows, PackedDataset) and isinstance(rows.corpus, TokenFiles):
            file, record = rows.corpus.place_of(name)
        elif isinstance(rows, StreamRows):
            file, _, number_there = name.rpartition(":")
            record = int(number_there)
        found.append(Document(source, str(name), file, record, min(tokens, left)))
        left -= found[-1].tokens
    return found
