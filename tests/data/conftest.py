"""A small corpus of known ids, without any tokenizer, and helpers for text files."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.shards import write_shards
from tests.support.texts import make_corpus
from titanlite.data.tokenize_files import Corpus


@pytest.fixture
def corpus() -> Corpus:
    """29 documents of 2 to 40 tokens, 599 tokens in all: prime, so that no size divides an
    epoch.
    """
    lengths = [2 + (i * 17) % 39 for i in range(29)]
    lengths[-1] += 599 - sum(lengths)
    return make_corpus(lengths)


@pytest.fixture
def names(tmp_path: Path) -> list[str]:
    """Files of a stream, of 94 documents in all."""
    return write_shards(tmp_path, [13, 20, 7, 16, 9, 18, 11])


@pytest.fixture
def logged(caplog: pytest.LogCaptureFixture) -> Callable[[], str]:
    """The text of all that titanlite has logged."""
    caplog.set_level("INFO", logger="titanlite")
    return lambda: caplog.text
