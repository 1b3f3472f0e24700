"""The benchmark of restarts: its phases end where the last rank does, and add up to the whole."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.processes import python

#: A run of some seconds.
TINY = [
    "--model.overrides.dim=64",
    "--model.overrides.n_layers=2",
    "--model.overrides.n_heads=4",
    "--training.seq_len=32",
    "--training.batch_size=1",
    "--no-validation.enable",
]


@pytest.mark.soak
def test_phases_of_a_real_restart_add_up_to_its_first_recorded_step(tmp_path: Path) -> None:
    out = f"--out={tmp_path / 'restarts'}"
    words = ["benchmarks/restarts.py", "--repeats=1", "--kinds=first,last", out, *TINY]
    done = python(*words)
    assert done.returncode == 0, done.stdout + done.stderr
    page = (tmp_path / "restarts.md").read_text()
    assert "end of the other ranks" in page
    assert "WRONG" not in page
    record = json.loads((tmp_path / "restarts.json").read_text())
    assert len(record["found"]) == 2
    for restart in record["found"]:
        assert list(restart["seconds"]) == list(record["phases"])
        assert min(restart["seconds"].values()) >= 0
        assert sum(restart["seconds"].values()) == pytest.approx(restart["whole"], abs=1e-3)
        assert restart["seconds"]["imported"] > 0.1
