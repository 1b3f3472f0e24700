"""The text and tokenizers that are bundled with titanlite."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.processes import ROOT
from titanlite.data.sources import BUNDLED
from titanlite.data.tokenizer import BUNDLED_SENTENCEPIECE, BUNDLED_TOKENIZER


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


@pytest.mark.soak
def test_the_committed_tokenizers_are_what_the_script_makes(tmp_path: Path) -> None:
    script = ROOT / "scripts" / "train_tokenizer.py"
    run = [sys.executable, str(script), "--out", str(tmp_path)]
    said = subprocess.run(
        run, check=True, env={"PYTHONPATH": str(ROOT)}, capture_output=True, text=True
    ).stdout
    for committed in (BUNDLED_TOKENIZER, BUNDLED_SENTENCEPIECE):
        assert (tmp_path / committed.name).read_bytes() == committed.read_bytes()
    readme = (BUNDLED_TOKENIZER.parent / "README.md").read_text()
    for line in said.splitlines():
        assert line.split("; ")[1].split(" ")[0] in readme
        assert line.split(", ")[-1].split(" ")[0] in readme


def test_the_committed_prompts_are_what_the_script_makes(tmp_path: Path) -> None:
    script = "import pathlib, sys, build_sft as b; b.FOLDER = pathlib.Path(sys.argv[1]); b.main()"
    run = [sys.executable, "-c", script, str(tmp_path)]
    subprocess.run(run, check=True, cwd=ROOT / "scripts", capture_output=True)
    for name in ("sft_test", "sft_validation"):
        (committed,) = BUNDLED[name].iterdir()
        assert (
            tmp_path / committed.parent.name / committed.name
        ).read_bytes() == committed.read_bytes()
