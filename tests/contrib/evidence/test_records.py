"""`titanlite prove --run`: the records of a good run, and of runs with one altered record."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.processes import titanlite
from tests.support.run_folders import strict_lines
from tests.support.tiny import EIGHT_STEPS
from titanlite.cli.main import main

SAVES = ["--checkpoint.enable_checkpoint", "--checkpoint.interval=2", "--no-validation.enable"]


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of eight steps that was stopped after four and resumed."""
    folder = tmp_path_factory.mktemp("runs") / "good"
    words = ["train", "debug_model.toml", *EIGHT_STEPS, *SAVES, f"--job.dump_folder={folder}"]
    for steps in (4, 8):
        done = titanlite(*words, f"--training.steps={steps}")
        assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture
def copied(good: Path, tmp_path: Path) -> Path:
    return shutil.copytree(good, tmp_path / "run")


def judged(folder: Path) -> tuple[int, dict[str, str], str]:
    out = folder.with_name("out")
    code = main(["prove", "--run", str(folder), "--folder", str(out)])
    found = json.loads((out / "proof.json").read_text())
    notes = " ".join(check["note"] for check in found["checks"])
    return code, {check["name"]: check["state"] for check in found["checks"]}, notes


def test_the_records_of_a_good_run_fit(good: Path) -> None:
    code, states, _ = judged(good)
    names = ("saves", "record", "resumes", "data")
    assert (code, states) == (0, dict.fromkeys(names, "holds"))
    (verdict,) = [
        line for line in strict_lines(good / "attempts.jsonl") if line["event"] == "resume"
    ]
    manifest = json.loads((good / "checkpoint" / "step-4" / "manifest.json").read_text())
    assert verdict["next_batch"] == manifest["train"]["resume"]["next_batch"]
    assert (verdict["step"], verdict["verified"]) == (4, True)


def edit(file: str, old: str, new: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        text = (folder / file).read_text()
        assert text.count(old)
        (folder / file).write_text(text.replace(old, new, 1))

    return change


def a_byte(folder: Path) -> None:
    file = folder / "checkpoint" / "step-6" / "__0_0.distcp"
    data = bytearray(file.read_bytes())
    data[-100] ^= 1
    file.write_bytes(data)


def a_row(folder: Path) -> None:
    lines = (folder / "metrics.jsonl").read_text().splitlines(keepends=True)
    (folder / "metrics.jsonl").write_text("".join([*lines[:3], lines[2], *lines[3:]]))


#: The check that fails, a part of its note, and the altered record.
ALTERED = {
    "weights": ("saves", "step-6/__0_0.distcp has changed", a_byte),
    "manifest": (
        "saves",
        "manifest.json is damaged",
        edit("checkpoint/step-6/manifest.json", '"next_sequence": 24', '"next_sequence": 28'),
    ),
    "tokens": (
        "record",
        "tokens after step 6: 385.0 and 384",
        edit("metrics.jsonl", '"tokens_seen": 384', '"tokens_seen": 385'),
    ),
    "row": ("record", "order of steps", a_row),
    "config": ("record", "config of step", edit("config.toml", "seed = 0", "seed = 1")),
    "batch": (
        "resumes",
        "batch of step 5",
        edit("attempts.jsonl", '"next_batch": "', '"next_batch": "0'),
    ),
    "verdict": (
        "resumes",
        "verdict at step 4",
        edit("attempts.jsonl", '"verified": true', '"verified": false'),
    ),
    "end": (
        "record",
        "state: failed and done",
        edit("attempts.jsonl", '"step": 8, "saved', '"state": "failed", "saved'),
    ),
}


@pytest.mark.parametrize("name", ALTERED)
def test_one_altered_record_is_found(copied: Path, name: str) -> None:
    where, said, change = ALTERED[name]
    change(copied)
    code, states, notes = judged(copied)
    assert code == 1 and said in notes
    assert states[where] == "fails"


def test_missing_checkpoints_are_told(copied: Path) -> None:
    shutil.rmtree(copied / "checkpoint")
    code, states, notes = judged(copied)
    assert code == 1 and "has kept no checkpoint" in notes
    assert "there is nothing to compare" in notes
    assert [states[name] for name in ("record", "saves", "data")] == ["holds", "not run", "not run"]


def test_other_data_are_told(copied: Path) -> None:
    edit("config.toml", 'dataset = "c4_test"', 'dataset = "c4_validation"')(copied)
    code, states, notes = judged(copied)
    assert (code, states["data"]) == (1, "fails") and "batch of step 3" in notes


def test_records_that_are_not_there_or_of_another_form_are_told(copied: Path) -> None:
    edit("attempts.jsonl", '"verified"', '"was_verified"')(copied)
    code, states, notes = judged(copied)
    assert (code, states["resumes"]) == (1, "not run") and "KeyError: 'verified'" in notes
    (copied / "attempts.jsonl").unlink()
    code, states, notes = judged(copied)
    assert (code, states["record"], states["data"]) == (1, "fails", "not run")
    assert "IndexError" in notes
