"""`titanlite drill` as a whole: faults that are survived pass, and what is broken fails."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from titanlite import exit_codes

ROOT = Path(__file__).resolve().parents[2]


def drill(*words: str, package: Path = ROOT) -> subprocess.CompletedProcess[str]:
    """The real command, in a process of its own; `package`: where titanlite is taken from."""
    found = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    return subprocess.run(
        [sys.executable, "-m", "titanlite.cli", "drill", str(ROOT / "train_configs" / "debug_model.toml"), *words],
        cwd=package,
        env={**found, "PYTHONPATH": str(package), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=900,
    )


@pytest.mark.slow
def test_a_few_faults_pass_and_leave_nothing_behind(tmp_path: Path) -> None:
    only = [word for name in ("resume", "kill-shard", "second-run") for word in ("--only", name)]
    os.environ["TMPDIR"] = str(tmp_path)
    try:
        done = drill("--json", *only, "--checkpoint.async_mode=async")
    finally:
        del os.environ["TMPDIR"]
    assert done.returncode == exit_codes.DONE, done.stderr
    result = json.loads(done.stdout)
    assert [(fault["name"], fault["passed"]) for fault in result["faults"]] == [
        ("resume", True),
        ("kill-shard", True),
        ("second-run", True),
    ]
    assert result["passed"] and result["kept"] is None
    assert len(re.findall(r"^pass ", done.stderr, re.MULTILINE)) == 3
    assert list(tmp_path.glob("titanlite*")) == []


@pytest.mark.soak
@pytest.mark.parametrize("flags", [[], ["--training.tensor_parallel_degree=2", "--checkpoint.async_mode=async"]])
def test_every_fault_passes(flags: list[str]) -> None:
    done = drill(*flags)
    assert done.returncode == exit_codes.DONE, done.stderr
    assert done.stdout == "15 of 15 as it must be\n" and "FAIL" not in done.stderr


@pytest.mark.slow
def test_what_is_broken_fails_and_its_runs_are_kept(tmp_path: Path) -> None:
    """A copy of titanlite that loads without looking at what it loads, and forgets the place in the text."""
    package = tmp_path / "broken"
    package.mkdir()
    for path in (ROOT / "titanlite").rglob("*"):
        if path.is_file() and "__pycache__" not in path.parts:
            copy = package / path.relative_to(ROOT)
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_bytes(path.read_bytes())
    (package / "train_configs").symlink_to(ROOT / "train_configs")
    trainer = package / "titanlite" / "trainer.py"
    text = trainer.read_text()
    assert 'self.parts.loader.load_state_dict(loaded.train["data"])' in text
    trainer.write_text(text.replace('self.parts.loader.load_state_dict(loaded.train["data"])', "pass"))
    done = drill("--only", "resume", "--only", "flipped-bit", "--checkpoint.verify=size", package=package)
    assert done.returncode == exit_codes.ERROR, done.stderr
    told = re.findall(r"^FAIL +(\S+) +[\d.]+ s  (.*)", done.stderr, re.MULTILINE)
    assert [name for name, _ in told] == ["resume", "flipped-bit"]
    assert "have other numbers than in the run that nothing happened to" in told[0][1]
    assert "resumed from step 4, not 2" in told[1][1]
    (kept,) = re.findall(r"with all they printed in console.log: (\S+)", done.stderr)
    assert "resumed from step 4" in (Path(kept) / "resume" / "console.log").read_text()
    assert done.stdout == "0 of 2 as it must be\n"
