"""The soak of random kills itself: a few kills, with each kind of saves that a busy machine can be
asked for.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.processes import python


@pytest.mark.soak
def test_runs_that_are_killed_end_as_if_they_were_not(tmp_path: Path) -> None:
    """Copies in the background too, an object store, and local saves with copies; foreground and
    background are the crash sweep's.
    """
    kinds = ["pinned", "store", "copied"]
    words = ["--kinds", *kinds, "--kills=6", "--steps=24", "--interval=4", "--seed=3"]
    done = python("benchmarks/crash_soak.py", *words, f"--out={tmp_path / 'soak'}", timeout=1800)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Nothing was lost, nothing came twice." in done.stdout
    tallies = json.loads((tmp_path / "soak.json").read_text())["tallies"]
    assert [tally["kind"] for tally in tallies] == kinds
    for tally in tallies:
        assert tally["kills"] == 2
        assert tally["runs_finished"] >= 1
        assert tally["starts"] >= 3
        assert tally["corruptions_found"] == tally["corruptions"]
        assert tally["data_lost"] == tally["tensors_unequal"] == 0
