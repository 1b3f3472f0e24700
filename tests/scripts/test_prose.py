"""Sentences of docs, docstrings, comments and messages are short."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.processes import ROOT
from tests.support.scripts import load_script

LONG = "This sentence has " + "very " * 22 + "many words."


@pytest.fixture(scope="module")
def prose() -> Any:
    return load_script("prose")


@pytest.mark.slow
def test_few_sentences_are_long(prose: Any) -> None:
    found = prose.sentences_of(ROOT)
    for kind, limit in prose.LIMITS.items():
        assert sum(sentence.kind == kind for sentence in found) > 500
        assert prose.share_of_long(found, kind) <= limit, f"python scripts/prose.py lists {kind}"


def test_a_semicolon_ends_no_sentence(prose: Any) -> None:
    halves = f"{LONG[:-1]}; so it goes on"
    assert prose.split(f"One short one. {halves}. `a b c d` stands for one.") == [
        "One short one.",
        f"{halves}.",
        "CODE stands for one.",
    ]
    assert prose.count_words(LONG) == 27
    assert prose.count_words(halves) == 31


def test_tables_code_and_headings_are_no_sentences(prose: Any) -> None:
    page = f"# {LONG}\n\n```\n{LONG}\n```\n\n| {LONG} |\n\n    {LONG}\n\n- First.\n- Second one.\n"
    assert list(prose.prose_of_page(page)) == ["First.", "Second one."]


def test_texts_of_code_are_told_apart(prose: Any, tmp_path: Path) -> None:
    room = tmp_path / "titanlite"
    room.mkdir()
    (room / "a.py").write_text(
        f'"""{LONG}"""\n# {LONG}\nraise ValueError(f"{LONG} It is {{1}} of all.")\nx = "{LONG}"\n'
    )
    found = [(one.kind, one.words) for one in prose.sentences_of(tmp_path)]
    assert sorted(found) == [
        ("comments", 27),
        ("docstrings", 27),
        ("messages", 5),
        ("messages", 27),
    ]
    assert prose.share_of_long(prose.sentences_of(tmp_path), "messages") == 50
