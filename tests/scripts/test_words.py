"""scripts/words.py: words, long sentences and the reading grade of pages."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.processes import ROOT

LONG = "The ranks " + "of a run " * 8 + "wait."


def rows(repository: Path) -> dict[str, list[str]]:
    printed = subprocess.run(
        [sys.executable, ROOT / "scripts" / "words.py", repository],
        capture_output=True,
        check=True,
        encoding="utf-8",
        env={"PYTHONIOENCODING": "utf-8"},
    ).stdout
    return {line[:34].strip(): line[34:].replace(" %", "").split() for line in printed.splitlines()}


def test_a_page_is_counted_and_sums_leave_reference_and_log_out(tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    (tmp_path / "README.md").write_text(f"# Title\n\nOne cat sat. {LONG}\n\n    code is no prose\n")
    (tmp_path / "docs" / "cli.md").write_text("The table tells each value.\n")
    (tmp_path / "docs" / "log.md").write_text("Left out.\n")
    found = rows(tmp_path)
    # 2 of the heading, 3 and 27 of the sentences, 4 of the code
    assert found["README.md"][:4] == ["36", "2", "1", "50.0"]
    assert found["the rest"] == found["README.md"]
    assert found["reference"] == found["docs/cli.md"]
    assert "docs/log.md" not in found
    # 5 words with 7 syllables: ta-ble, val-ue
    assert float(found["docs/cli.md"][4]) == pytest.approx(0.39 * 5 + 11.8 * 7 / 5 - 15.59, abs=0.1)
