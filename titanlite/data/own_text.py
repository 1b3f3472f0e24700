"""Text of a function of yours: a source whose name is a dotted path."""

from __future__ import annotations

from typing import TYPE_CHECKING

from titanlite.config.data_sections import DataSource
from titanlite.data.corpus import Corpus, tokenize
from titanlite.data.sources import columns_of, own_records
from titanlite.data.text_keys import key_of

if TYPE_CHECKING:
    from titanlite.data.text import TextReader


def own_corpus(reader: TextReader, source: DataSource, section: str) -> Corpus:
    """Tokenize the documents of the function. section: of the config, for errors.

    Its code says nothing of its text, so its tokens are not cached.
    """
    name = source.name or ""
    columns = columns_of(reader.data, name, None, source, reader.tokenizer)
    records = own_records(name, key_of(section), columns)
    workers = reader.data.num_workers or 0
    return tokenize((), reader.tokenizer, reader.vocab_size, workers, records)
