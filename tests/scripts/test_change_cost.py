"""The checks of benchmarks/change_cost fail on a tree where nothing was implemented."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.support.processes import ROOT

FOLDER = ROOT / "benchmarks" / "change_cost"


@pytest.mark.slow
def test_every_check_fails_without_its_change(tmp_path):
    tasks = sorted(path.with_suffix(".py") for path in FOLDER.glob("*.md") if path.stem.islower())
    assert len(tasks) == 5
    running = [
        subprocess.Popen([sys.executable, task], cwd=tmp_path, stdout=subprocess.PIPE, text=True)
        for task in tasks
    ]
    for task, process in zip(tasks, running, strict=True):
        said, _ = process.communicate()
        assert process.returncode == 1, task
        assert said.startswith("FAIL: a config with --") and said.endswith(" is refused\n"), said
