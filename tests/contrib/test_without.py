"""The core works where folders of `titanlite/contrib` are deleted, and says what is missing."""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path

import pytest

from tests.support.processes import ROOT, python

SAVES = "--checkpoint.enable_checkpoint"
#: Folder → its commands, and the flags of its keys, the key itself last.
FOLDERS: dict[str, tuple[list[str], list[str]]] = {
    "evidence": (["prove", "parity"], []),
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
    "tests/checkpoint/test_retention.py",
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


def test_each_folder_is_here():
    found = {path.parent.name for path in (ROOT / "titanlite" / "contrib").glob("*/README.md")}
    assert found == set(FOLDERS)


#: Imports all that is there, then runs commands; prints the exit code and the words of each.
COMMANDS = """
import contextlib, importlib, io, json, pkgutil, sys
import titanlite
from titanlite.cli.main import main

for module in pkgutil.walk_packages(titanlite.__path__, "titanlite."):
    if not module.name.endswith("__main__"):
        importlib.import_module(module.name)
for words in json.loads(sys.argv[1]):
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        try:
            code = main(words)
        except SystemExit as end:
            code = end.code
    print(json.dumps([code, said.getvalue()]))
"""


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("name", FOLDERS)
def test_all_else_works_without_a_folder_and_its_commands_and_keys_are_refused_by_one_line(
    name, tmp_path
):
    copy = copy_without(tmp_path, name)
    commands, flags = FOLDERS[name]
    check = ["config", "check", "debug_model.toml"]
    asked = [[command, "debug_model.toml"] for command in commands]
    asked += [["--help"], check, [*check, *flags]]
    done = python("-c", COMMANDS, json.dumps(asked), cwd=copy, env={"PYTHONPATH": str(copy)})
    assert done.returncode == 0, done.stderr
    *refused, (_, help), plain, (code, said) = map(json.loads, done.stdout.splitlines())
    lack = f"needs titanlite.contrib.{name}, which is not installed"
    assert refused == [[2, f"error: `titanlite {command}` {lack}\n"] for command in commands]
    every = {command for commands, _ in FOLDERS.values() for command in commands}
    listed = set(re.findall(r"^ +([a-z]+)", help, re.M))
    assert {"train", "plan", *every} - listed == set(commands)
    assert plain[0] == 0
    if flags:
        key = flags[-1].strip("-").partition("=")[0]
        assert code == 2 and f"command line: {key}: {lack}\n" in said


@pytest.mark.slow
def test_a_run_trains_and_tests_of_the_core_pass_without_contrib(tmp_path):
    copy = copy_without(tmp_path / "copy", *FOLDERS)
    assert losses(copy, tmp_path / "run") == losses(ROOT, tmp_path / "plain")
    words = ["-m", "pytest", "-q", "-m", "not slow", "-p", "no:cacheprovider", *CORE]
    done = python(*words, cwd=copy, env={"PYTHONPATH": str(copy)})
    assert done.returncode == 0, done.stdout


def losses(root: Path, dump: Path) -> list[float]:
    """Train with a copy; return the losses."""
    words = ["-m", "titanlite", "train", "debug_model.toml", *TINY, SAVES]
    env = {"PYTHONPATH": str(root)}
    done = python(*words, f"--job.dump_folder={dump}", cwd=root, env=env)
    assert done.returncode == 0, done.stderr
    lines = (dump / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["loss"] for line in lines]


#: Imports for type checkers alone.
TYPES = re.compile(r"if TYPE_CHECKING:\n(?:    .*\n|\n)+")


def test_the_core_names_contrib_in_the_table_of_doors_alone():
    library = ROOT / "titanlite"
    found = set()
    for file in library.rglob("*.py"):
        place = file.relative_to(library)
        text = TYPES.sub("", file.read_text(encoding="utf-8"))
        if place.parts[0] != "contrib" and re.search(r"(from |import |\")titanlite\.contrib", text):
            found.add(str(place))
    assert found == {"doors.py"}
