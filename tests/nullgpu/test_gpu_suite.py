"""GPU tests and the GPU benchmark on the null GPU; only assertions on numbers may fail."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.nullgpu.cases import ROOT

pytestmark = pytest.mark.nullgpu


def run(*command: str, folder: Path) -> None:
    given = {**os.environ, "NULLGPU_DIR": str(folder), "NULLGPU_ZERO": "1"}
    done = subprocess.run(command, cwd=ROOT, env=given, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]


@pytest.mark.parametrize("name", ["attention", "features", "memory_plan", "training"])
def test_gpu_tests_end_at_numbers_alone(nullgpu: Path, name: str) -> None:
    run(
        "tests/nullgpu/run.sh",
        str(nullgpu),
        "-m",
        "pytest",
        "-q",
        f"tests/gpu/test_{name}.py",
        folder=nullgpu,
    )


def test_a_dry_run_goes_through_every_level_of_a_ladder(nullgpu: Path, tmp_path: Path) -> None:
    run(
        "benchmarks/gpu.sh",
        "machine",
        "ladder-8b",
        "--dry-run",
        "--out",
        str(tmp_path / "gpu"),
        folder=nullgpu,
    )
    text = (tmp_path / "gpu" / "gpu.md").read_text()
    assert all(
        f"| {level} |" in text for level in ("default", "compile", "float8", "float8-all-gather")
    )
