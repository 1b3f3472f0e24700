"""The text and tokenizers that are bundled with titanlite."""

from __future__ import annotations

import gzip
import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from titanlite.data.sources import BUNDLED
from titanlite.data.tokenizer import BUNDLED_SENTENCEPIECE, BUNDLED_TOKENIZER

ROOT = Path(__file__).resolve().parents[2]


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


def test_every_record_is_one_of_the_books_with_c4s_keys(
    training: list[dict[str, str]], held_out: list[dict[str, str]]
) -> None:
    for record in training + held_out:
        assert list(record) == ["text", "timestamp", "url"]
        assert all(isinstance(value, str) and value for value in record.values())
        assert not any(word in record["text"] for word in ("Gutenberg", "Signet", "Copyright", "copyright 1"))
    text = {record["url"]: record["text"] for record in training + held_out}
    assert len(text) == len(training) + len(held_out)
    counts = [sum(url.startswith(f"debian:{book}/") for url in text) for book in ("bible-kjv", "r-cran-janeaustenr")]
    assert counts == [1189, 55 + 48 + 31 + 24 + 61 + 50]  # chapters
    assert sum(counts) + sum(url.startswith("debian:dict-devil/") for url in text) == len(text)
    assert "In the beginning God created the heaven and the earth.\n" in text["debian:bible-kjv/Genesis/1"]


def test_held_out_documents_are_a_twentieth_and_not_in_the_training_text(
    training: list[dict[str, str]], held_out: list[dict[str, str]]
) -> None:
    assert sum(len(record["text"].encode()) for record in training) >= 4_000_000
    assert 0.03 < len(held_out) / (len(training) + len(held_out)) < 0.07
    for key in ("url", "text"):
        assert not {record[key] for record in training} & {record[key] for record in held_out}


def test_gzip_files_are_reproducible() -> None:
    files = [file for folder in BUNDLED.values() for file in folder.iterdir()]
    assert len(files) >= 3 and all(file.name.endswith(".json.gz") for file in files)
    assert all(file.read_bytes()[3:8] == bytes(5) for file in files), "a file name or a time is stored"


@pytest.mark.soak
def test_the_committed_tokenizers_are_what_the_script_makes(tmp_path: Path) -> None:
    script = ROOT / "scripts" / "train_tokenizer.py"
    run = [sys.executable, str(script), "--out", str(tmp_path)]
    said = subprocess.run(run, check=True, env={"PYTHONPATH": str(ROOT)}, capture_output=True, text=True).stdout
    for committed in (BUNDLED_TOKENIZER, BUNDLED_SENTENCEPIECE):
        assert (tmp_path / committed.name).read_bytes() == committed.read_bytes()
    readme = (BUNDLED_TOKENIZER.parent / "README.md").read_text()
    for line in said.splitlines():
        assert line.split("; ")[1].split(" ")[0] in readme and line.split(", ")[-1].split(" ")[0] in readme


def load_benchmark() -> ModuleType:
    spec = importlib.util.spec_from_file_location("bigram_baseline", ROOT / "benchmarks" / "bigram_baseline.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_bigram_baseline_is_a_proper_model_and_beats_unigrams() -> None:
    baseline = load_benchmark()
    rng = np.random.default_rng(0)
    train = rng.integers(0, 40, 500)
    for context in (3, 45):  # 45 never occurs in training
        total = sum(np.exp(-baseline.bigram_nats(train, np.array([context, w]), 50)) for w in range(50))
        assert abs(total - 1) < 1e-9
    alternating = np.tile([1, 2], 500)
    assert (
        baseline.bigram_nats(alternating, alternating, 50) < 0.1 < baseline.unigram_nats(alternating, alternating, 50)
    )


def test_pages_state_the_numbers(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["bigram_baseline.py"])
    load_benchmark().main()
    printed = capsys.readouterr().out
    docs = (ROOT / "docs" / "data.md").read_text()
    for model in ("uniform", "unigram", "bigram"):
        value = float(next(line for line in printed.splitlines() if line.startswith(model)).split()[1])
        row = next(line for line in docs.splitlines() if line.startswith(f"| {model}"))
        assert float(row.split("|")[2]) == pytest.approx(value, abs=6e-4)
    readme = (BUNDLED_TOKENIZER.parent / "README.md").read_text()
    assert f"training tokens {readme.split('8.1 MB | ')[1].split(' ')[0]}," in printed
