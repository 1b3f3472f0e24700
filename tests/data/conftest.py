"""A small corpus of known ids, without any tokenizer."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from titanlite.data.corpus import Corpus


def make_corpus(lengths: list[int]) -> Corpus:
    """Documents of these lengths; every token of the corpus has an id of its own, so each can be traced."""
    total = sum(lengths)
    return Corpus(
        tokens=np.arange(1, total + 1, dtype=np.uint16),
        offsets=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
        pad_id=0,
        fingerprint="0" * 64,
        files=(Path("none"),),
    )


@pytest.fixture
def corpus() -> Corpus:
    """29 documents of 2 to 40 tokens, 599 tokens in all: prime, so that no size divides an epoch."""
    lengths = [2 + (i * 17) % 39 for i in range(29)]
    lengths[-1] += 599 - sum(lengths)
    assert lengths[-1] >= 2
    return make_corpus(lengths)
