"""The text and tokenizers that are bundled with titanlite."""

from __future__ import annotations

import gzip
import json

import pytest

from titanlite.data.text_files import BUNDLED


def records(dataset: str) -> list[dict[str, str]]:
    found = []
    for file in sorted(BUNDLED[dataset].iterdir()):
        with gzip.open(file, "rt", encoding="utf-8") as lines:
            found += [json.loads(line) for line in lines]
    return found


@pytest.fixture(scope="module")
def training() -> list[dict[str, str]]:
    return records("c4_test")


@pytest.fixture(scope="module")
def held_out() -> list[dict[str, str]]:
    return records("c4_validation")


def test_held_out_documents_are_a_twentieth_and_not_in_the_training_text(
    training: list[dict[str, str]], held_out: list[dict[str, str]]
) -> None:
    assert sum(len(record["text"].encode()) for record in training) >= 4_000_000
    assert 0.03 < len(held_out) / (len(training) + len(held_out)) < 0.07
    for key in ("url", "text"):
        assert not {record[key] for record in training} & {record[key] for record in held_out}
