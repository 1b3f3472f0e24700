"""The benchmark of restarts: its phases end where the last rank does, and add up to the whole."""

from __future__ import annotations

import importlib.util
import json
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.support.processes import ROOT, python

#: A run of some seconds.
TINY = [
    "--model.overrides.dim=64",
    "--model.overrides.n_layers=2",
    "--model.overrides.n_heads=4",
    "--training.seq_len=32",
    "--training.batch_size=1",
    "--no-validation.enable",
]


@pytest.fixture(scope="module")
def restarts() -> ModuleType:
    spec = importlib.util.spec_from_file_location("restarts", ROOT / "benchmarks" / "restarts.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_phase_ends_with_the_last_rank_and_the_mark_of_torchrun_after_the_kill(
    restarts: ModuleType,
) -> None:
    of_ranks = list(restarts.PHASES)[2:]
    first = {mark: 103.0 + number for number, mark in enumerate(of_ranks)}
    second = {mark: moment + 0.5 for mark, moment in first.items()}
    second["loaded"] = first["loaded"] - 0.25
    lines = [
        {"launcher": "noticed", "time": 50.0},
        {"launcher": "ended", "time": 51.0},
        {"launcher": "noticed", "time": 101.0},
        {"launcher": "ended", "time": 102.0},
        {"launcher": "noticed", "time": 102.5},
        {"launcher": "ended", "time": 102.6},
    ]
    ranks = [{"rank": 0, "times": first}, {"rank": 1, "times": second}]
    ends = dict(zip(restarts.PHASES, restarts.phase_ends(100.0, lines, ranks), strict=True))
    assert ends["noticed"] == 101.0
    assert ends["ended"] == 102.0
    assert ends["launched"] == second["launched"]
    assert ends["loaded"] == first["loaded"]
    assert ends["stepped"] == second["stepped"]
    assert all(before <= after for before, after in pairwise(ends.values()))


def test_phases_that_do_not_add_up_are_wrong(restarts: ModuleType) -> None:
    seconds = dict.fromkeys(restarts.PHASES, 0.5)
    whole = sum(seconds.values())
    restart = {"seconds": seconds, "whole": whole, "recorded": whole + 0.1}
    assert restarts.verdict([restart])[1]
    for wrong in ({**restart, "recorded": whole + 2}, _without_order(restart)):
        words, good = restarts.verdict([restart, wrong])
        assert not good
        assert "WRONG" in words


def _without_order(restart: dict[str, Any]) -> dict[str, Any]:
    """A restart with a phase that ends before it begins, and the same sum."""
    seconds = {**restart["seconds"], "code": -0.5, "checked": 1.5}
    return {**restart, "seconds": seconds}


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
