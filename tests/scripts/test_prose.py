"""Sentences of docs, docstrings, comments and messages are short."""

from __future__ import annotations

import pytest

from tests.support.processes import ROOT
from tests.support.scripts import load_script


@pytest.mark.slow
def test_few_sentences_are_long() -> None:
    prose = load_script("prose")
    found = prose.sentences_of(ROOT)
    for kind, limit in prose.LIMITS.items():
        assert sum(sentence.kind == kind for sentence in found) > 500
        assert prose.share_of_long(found, kind) <= limit, f"python scripts/prose.py lists {kind}"
