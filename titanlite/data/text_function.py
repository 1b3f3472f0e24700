"""Text of a function of yours: a source whose name is a dotted path."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from titanlite.config.data_sections import DataSource
from titanlite.config.own_functions import load_function
from titanlite.data import DataError
from titanlite.data.dataset_sources import key_of
from titanlite.data.records import Columns, Record, strings_of
from titanlite.data.text_files import columns_of
from titanlite.data.tokenize_files import Corpus, tokenize

if TYPE_CHECKING:
    from titanlite.data.dataset_builder import TextReader


def own_corpus(reader: TextReader, source: DataSource, section: str) -> Corpus:
    """Tokenize the documents of the function, uncached: its code says nothing of its text."""
    name = source.name or ""
    columns = columns_of(reader.data, name, None, source, reader.tokenizer)
    records = own_records(name, key_of(section), columns)
    workers = reader.data.num_workers or 0
    return tokenize((), reader.tokenizer, reader.vocab_size, workers, records)


def own_records(function: str, key: str, columns: Columns | None = None) -> Iterator[Record]:
    """Iterate over the documents of a function by dotted path: texts, or tables with `columns`.

    It must return the same documents in the same order, which numbers them, on each rank and at
    each start. Raises DataError, naming the config's `key`, for a document without a text or no
    documents.
    """
    number = 0
    columns = columns or Columns()
    documents = load_function(key, function)()
    is_sequence = hasattr(documents, "__getitem__")  # torch's data sets have no more
    if isinstance(documents, str | dict) or not (is_sequence or isinstance(documents, Iterable)):
        raise DataError(
            f"{key}: {function} returned {documents!r:.60}, expected documents: yield them, or "
            "return a list"
        )
    for number, document in enumerate(documents, 1):
        where = f"{key}: document {number} of {function}"
        if columns.chat is not None and isinstance(document, list):
            document = {columns.text: document}
        if isinstance(document, str) and columns.chat is None:
            strings = [document]
        else:
            strings = strings_of(document, columns, where)
        yield Record(function, number, *strings)
    if not number:
        raise DataError(f"{key}: {function} returned no documents")
