"""`titanlite drill` as a whole: faults that are survived pass, and what is broken fails."""

from __future__ import annotations

import json
import os
import re
import shutil
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
    assert done.stdout == "21 of 21 as it must be\n" and "FAIL" not in done.stderr


def broken(folder: Path, changes: dict[str, tuple[str, str]]) -> Path:
    """A copy of titanlite below `folder` in which, by file, one piece of text is another."""
    package = folder / "broken"
    for path in (ROOT / "titanlite").rglob("*"):
        if path.is_file() and "__pycache__" not in path.parts:
            copy = package / path.relative_to(ROOT)
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_bytes(path.read_bytes())
    (package / "train_configs").symlink_to(ROOT / "train_configs")
    for name, (right, wrong) in changes.items():
        text = (package / "titanlite" / name).read_text()
        assert text.count(right) == 1, f"{name} has no {right!r}"
        (package / "titanlite" / name).write_text(text.replace(right, wrong))
    return package


def failures(done: subprocess.CompletedProcess[str]) -> dict[str, str]:
    """Fault that failed → what was told of it."""
    assert done.returncode == exit_codes.ERROR, done.stderr
    return dict(re.findall(r"^FAIL +(\S+) +[\d.]+ s  (.*)", done.stderr, re.MULTILINE))


def kept(done: subprocess.CompletedProcess[str]) -> Path:
    """Where the runs are that did not go as they must."""
    (folder,) = re.findall(r"with all they printed in console.log: (\S+)", done.stderr)
    return Path(folder)


@pytest.mark.slow
def test_what_is_broken_fails_and_its_runs_are_kept(tmp_path: Path) -> None:
    """A copy of titanlite that loads without looking at what it loads, and forgets the place in the text."""
    changes = {"trainer.py": ('self.parts.loader.load_state_dict(loaded.train["data"])', "pass")}
    package = broken(tmp_path, changes)
    done = drill("--only", "resume", "--only", "flipped-bit", "--checkpoint.verify=size", package=package)
    told = failures(done)
    assert list(told) == ["resume", "flipped-bit"]
    assert "have other numbers than in the run that nothing happened to" in told["resume"]
    assert "resumed from step 4, not 2" in told["flipped-bit"]
    assert "resumed from step 4" in (kept(done) / "resume" / "console.log").read_text()
    assert done.stdout == "0 of 2 as it must be\n"
    shutil.rmtree(kept(done))


@pytest.mark.slow
def test_what_nobody_tells_or_makes_up_for_fails(tmp_path: Path) -> None:
    """A copy of titanlite that has each of these faults: no report names a rank, none is told of another's error, a
    validation that was broken off is forgotten, as are saves in the background that fail."""
    changes = {
        "metrics/hang_report.py": ("return free if len(free) < size else []", "return []"),
        "metrics/watchdog.py": (
            'self._store.compare_set("raised", "", replace(self._state(), stack=stack[::-1][:_FRAMES]).dump())',
            "pass",
        ),
        "trainer.py": ('state["validation_owed"] = True', "pass"),
        "saving.py": ("if outcome.problem:", "if False:"),
    }
    names = ["sigterm-validation", "loader-raises", "loader-hangs", "background-save"]
    only = [word for name in names for word in ("--only", name)]
    done = drill(*only, package=broken(tmp_path, changes))
    told = failures(done)
    assert list(told) == names
    assert told["sigterm-validation"] == "steps [4] have other numbers than in the run that nothing happened to"
    assert told["loader-raises"].startswith("rank 0 did not say that rank 1 raised in its loader")
    assert told["loader-hangs"].startswith("not rank 1 in data of step 6 was named")
    assert told["background-save"].startswith("the failed save was not told")
    shutil.rmtree(kept(done))


@pytest.mark.slow
def test_a_guard_that_does_not_guard_fails(tmp_path: Path) -> None:
    """A copy of titanlite whose bad steps are applied, and which reads the bad text again after it went back."""
    changes = {
        "step.py": ("gated_step(optimizer, ok.to(host), lr)", "gated_step(optimizer, ok.to(host) | True, lr)"),
        "trainer.py": ('"data": behind(data, fetched)', '"data": data'),
    }
    only = ["--only", "nan-skip", "--only", "nan-rollback"]
    done = drill(*only, package=broken(tmp_path, changes))
    told = failures(done)
    assert list(told) == ["nan-skip", "nan-rollback"]
    assert told["nan-skip"].startswith(f"it ended with {[exit_codes.GUARD] * 2}")
    assert told["nan-rollback"] == "steps [5, 6, 7, 8] have other numbers than in the run nan-left-out"
    shutil.rmtree(kept(done))
