"""A small corpus of known ids, without any tokenizer, and helpers for text files."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from titanlite.data.corpus import Corpus


def make_corpus(lengths: list[int]) -> Corpus:
    """Documents of these lengths; every token of the corpus has an id of its own, so each can be
    traced.
    """
    total = sum(lengths)
    return Corpus(
        tokens=np.arange(1, total + 1, dtype=np.uint16),
        offsets=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
        pad_id=0,
        fingerprint="0" * 64,
        files=(Path("none"),),
    )


def write_texts(path: Path, texts: list[str], raw: dict[int, str] | None = None) -> Path:
    """Write records of `texts`; raw: lines by number, from 1, that replace a record."""
    lines = [
        (raw or {}).get(n, json.dumps({"text": text})) for n, text in enumerate(texts, start=1)
    ]
    path.write_text("".join(line + "\n" for line in lines))
    return path


@pytest.fixture
def corpus() -> Corpus:
    """29 documents of 2 to 40 tokens, 599 tokens in all: prime, so that no size divides an
    epoch.
    """
    lengths = [2 + (i * 17) % 39 for i in range(29)]
    lengths[-1] += 599 - sum(lengths)
    assert lengths[-1] >= 2
    return make_corpus(lengths)


@pytest.fixture
def logged(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> Callable[[], str]:
    """The text of all that titanlite has logged, whatever an earlier test has set up."""
    monkeypatch.setattr("titanlite.utils.logger.handlers", [])
    monkeypatch.setattr("titanlite.utils.logger.propagate", True)
    caplog.set_level("INFO", logger="titanlite")
    return lambda: caplog.text
