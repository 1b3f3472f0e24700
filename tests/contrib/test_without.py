"""The core works where folders of `titanlite/contrib` are deleted, and says what is missing."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.support.processes import ROOT, python

SAVES = "--checkpoint.enable_checkpoint"
#: Folder → its commands, and the flags of its keys, the key itself last.
FOLDERS: dict[str, tuple[list[str], list[str]]] = {
    "hub": (["push"], [SAVES, "--checkpoint.hub=ada/tiny"]),
    "lab": (["sweep", "ladder", "mup"], []),
    "resilience": ([], [SAVES, "--checkpoint.local_folder=/local"]),
    "trackers": ([], ["--metrics.trackers=mlflow"]),
}
TINY = (
    "--training.steps=2",
    "--training.seq_len=64",
    "--training.batch_size=2",
    "--model.overrides.n_layers=1",
    "--validation.enable=false",
    "--metrics.enable_tensorboard=false",
)
#: Tests of the core that run without any of them.
CORE = (
    "tests/config/test_layers.py",
    "tests/checkpoint/test_manifest.py",
)


def copy_without(folder: Path, *names: str) -> Path:
    """Return a copy of the repository without folders of contrib."""
    ignored = shutil.ignore_patterns("__pycache__")
    for name in ("titanlite", "tests"):
        shutil.copytree(ROOT / name, folder / name, ignore=ignored, copy_function=os.link)
    for path in ROOT.iterdir():
        if not (folder / path.name).exists() and path.name[0] != ".":
            (folder / path.name).symlink_to(path)
    for name in names:
        shutil.rmtree(folder / "titanlite" / "contrib" / name)
        shutil.rmtree(folder / "tests" / "contrib" / name)
    return folder


def titanlite(root: Path, *words: object) -> subprocess.CompletedProcess[str]:
    """Run the command of a copy."""
    return python("-m", "titanlite", *words, cwd=root, env={"PYTHONPATH": str(root)})


def test_each_folder_is_here() -> None:
    found = {path.parent.name for path in (ROOT / "titanlite" / "contrib").glob("*/README.md")}
    assert found == set(FOLDERS)


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("name", FOLDERS)
def test_commands_and_keys_of_a_missing_folder_are_refused_by_one_line(
    name: str, tmp_path: Path
) -> None:
    copy = copy_without(tmp_path, name)
    commands, flags = FOLDERS[name]
    lack = f"needs titanlite.contrib.{name}, which is not installed"
    for command in commands:
        done = titanlite(copy, command, "debug_model.toml")
        assert done.returncode == 2
        assert done.stderr == f"error: `titanlite {command}` {lack}\n"
    help = titanlite(copy, "--help")
    listed = set(re.findall(r"^ +([a-z]+)", help.stdout, re.M))
    every = [command for commands, _ in FOLDERS.values() for command in commands]
    assert {"train", "plan", *every} - listed == set(commands)
    assert titanlite(copy, "config", "check", "debug_model.toml").returncode == 0
    if flags:
        key = flags[-1].strip("-").partition("=")[0]
        done = titanlite(copy, "config", "check", "debug_model.toml", *flags)
        assert done.returncode == 2
        assert f"command line: {key}: {lack}\n" in done.stderr


@pytest.mark.slow
def test_a_run_trains_and_tests_of_the_core_pass_without_contrib(tmp_path: Path) -> None:
    copy = copy_without(tmp_path / "copy", *FOLDERS)
    assert losses(copy, tmp_path / "run") == losses(ROOT, tmp_path / "plain")
    words = ["-m", "pytest", "-q", "-m", "not slow", "-p", "no:cacheprovider", *CORE]
    done = python(*words, cwd=copy, env={"PYTHONPATH": str(copy)})
    assert done.returncode == 0, done.stdout


def losses(root: Path, dump: Path) -> list[float]:
    """Train with a copy; return the losses."""
    done = titanlite(root, "train", "debug_model.toml", *TINY, SAVES, f"--job.dump_folder={dump}")
    assert done.returncode == 0, done.stderr
    lines = (dump / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["loss"] for line in lines]
