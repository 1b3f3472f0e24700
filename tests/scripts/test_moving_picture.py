"""docs/images/resume.svg shows what its source run prints today."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from tests.support.processes import ROOT

sys.path.insert(0, str(ROOT))

from scripts import moving_picture  # noqa: E402

PICTURE = ROOT / "docs" / "images" / "resume.svg"


def _sign(line: str) -> str:
    """Return the first words of a line without its time, numbers and names of this machine."""
    line = re.sub(r"^[\d-]+ [\d:]+ ", "", line)
    line = re.sub(r" ?\(.*?\)", "", line)
    line = re.sub(r"/\S+", "PATH", line)
    line = re.sub(r"[\d.,]+", "9", line)
    return " ".join(line.split()[:3])


def _signs(lines: list[str]) -> set[str]:
    """Return the signs of lines of the log and of errors, not of their second halves."""
    dated = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d \S"
    return {_sign(line) for line in lines if re.match(rf"{dated}|rank \d|error: |all \d", line)}


def test_the_picture_names_no_place_of_the_machine_that_drew_it() -> None:
    text = "".join(moving_picture.lines_of(PICTURE.read_text()))
    places = re.findall(r"(?<![\w.~/-])/\w[\w.-]*/", text)
    # That of the machine on which torch was built is in gloo's messages.
    assert set(places) <= {"/__w/"}, places


@pytest.mark.soak
def test_its_run_still_prints_these_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # A smaller model prints the same, but for numbers. Its steps take long enough for a look at
    # those in which a rank is killed.
    smaller = "[model.overrides]\nn_layers = 2\n[training]\nbatch_size = 2\n"
    run = moving_picture.RUN
    assert run.count("[training]\n") == 1
    monkeypatch.setattr(moving_picture, "RUN", run.replace("[training]\n", smaller))
    recording = moving_picture.record(tmp_path)
    drawn = moving_picture.draw(recording)
    assert set(moving_picture.lines_of(drawn)) == set(recording.lines())
    shown = _signs(moving_picture.lines_of(PICTURE.read_text()))
    assert shown - _signs(recording.lines()) == set(), (
        "run: python scripts/moving_picture.py docs/images/resume.svg"
    )
