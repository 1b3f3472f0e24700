"""`titanlite drill`: a working trainer passes, a broken one fails."""

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
from titanlite.tools.cli import main
from titanlite.tools.drill import SCENARIOS

ROOT = Path(__file__).resolve().parents[2]


def drill(*words: str, package: Path = ROOT, folder: str = "") -> subprocess.CompletedProcess[str]:
    """Run the command in a process of its own. package: folder with titanlite. folder: for temporary files."""
    variables = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    variables |= {"PYTHONPATH": str(package), "OMP_NUM_THREADS": "1", **({"TMPDIR": folder} if folder else {})}
    command = [sys.executable, "-m", "titanlite.tools.cli", "drill", str(ROOT / "train_configs" / "debug_model.toml")]
    return subprocess.run([*command, *words], cwd=package, env=variables, capture_output=True, text=True, timeout=900)


def only(*names: str) -> list[str]:
    return [word for name in names for word in ("--only", name)]


def test_the_command_lists_its_faults_without_torch() -> None:
    code = "import sys; from titanlite.tools.cli import main\ntry: main(['drill', '--list'])\n"
    code += "except SystemExit: print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert [line.split()[0] for line in done.stdout.splitlines()] == [*(one.name for one in SCENARIOS), "False"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["nosuch.toml"], "nosuch.toml"),
        (["debug_model.toml", "--ranks", "1"], "--ranks: expected an integer >= 2"),
        (["debug_model.toml", "--only", "flood"], "'flood'"),
        (["debug_model.toml", "--training.setps=3"], "training.setps"),
        ([], "CONFIG"),
    ],
)
def test_a_wrong_command_line_is_refused(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        assert main(["drill", *words]) == exit_codes.CONFIG
    except SystemExit as end:  # argparse's own
        assert end.code == exit_codes.CONFIG
    assert said in capsys.readouterr().err


@pytest.mark.slow
def test_a_few_faults_pass_and_leave_nothing_behind(tmp_path: Path) -> None:
    names = ["resume", "kill-shard", "dead-lock"]
    done = drill("--json", *only(*names), "--checkpoint.async_mode=async", folder=str(tmp_path))
    assert done.returncode == exit_codes.DONE, done.stderr
    result = json.loads(done.stdout)
    assert [(fault["name"], fault["passed"]) for fault in result["faults"]] == [(name, True) for name in names]
    assert result["passed"] and result["kept"] is None
    assert len(re.findall(r"^pass ", done.stderr, re.MULTILINE)) == 3
    assert list(tmp_path.glob("titanlite*")) == []


@pytest.mark.soak
@pytest.mark.parametrize("flags", [[], ["--training.tensor_parallel_degree=2", "--checkpoint.async_mode=async"]])
def test_every_fault_passes(flags: list[str]) -> None:
    done = drill(*flags)
    assert done.returncode == exit_codes.DONE, done.stderr
    assert done.stdout == f"{len(SCENARIOS)} of {len(SCENARIOS)} passed\n" and "FAIL" not in done.stderr


#: A fault of the trainer -> its file, a piece of the code, what replaces it, the scenarios that find it.
BROKEN = {
    "the position in the text is not restored": (
        *("trainer.py", 'parts.loader.load_state_dict(loaded.train["data"])', "pass"),
        {"resume": "steps [5, 6, 7, 8]"},
    ),
    "an interrupted validation is forgotten": (
        *("trainer.py", 'state["validation_owed"] = True', "pass"),
        {"sigterm-validation": "steps [6]"},
    ),
    "a failed save in the background is not reported": (
        *("trainer.py", "if outcome.problem:", "if False:"),
        {"background-save": "not reported"},
    ),
    "a bad step is applied": (
        *("step.py", "gated_step(self.optimizer, ok, lr)", "gated_step(self.optimizer, ok | True, lr)"),
        {"nan-skip": f"{[exit_codes.GUARD] * 2}"},
    ),
    "the bad text is read again after a rollback": (
        *("trainer.py", '"data": skip_to(data, fetched)', '"data": data'),
        {"nan-rollback": "steps [5, 6, 7, 8]"},
    ),
}


def broken(folder: Path, *faults: str) -> Path:
    """Copy titanlite below `folder`, with these faults."""
    package = folder / "broken"
    shutil.copytree(ROOT / "titanlite", package / "titanlite", ignore=shutil.ignore_patterns("__pycache__"))
    (package / "train_configs").symlink_to(ROOT / "train_configs")
    for fault in faults:
        name, right, wrong, _ = BROKEN[fault]
        text = (package / "titanlite" / name).read_text()
        assert text.count(right) == 1, f"{name} has no {right!r}"
        (package / "titanlite" / name).write_text(text.replace(right, wrong))
    return package


def check_failures(done: subprocess.CompletedProcess[str], expected: dict[str, str]) -> Path:
    """Check that these scenarios failed, each with a text. Returns the folder with their runs."""
    assert done.returncode == exit_codes.ERROR, done.stderr
    failed = dict(re.findall(r"^FAIL +(\S+) +[\d.]+ s  (.*)", done.stderr, re.MULTILINE))
    assert failed.keys() == expected.keys(), done.stderr
    assert all(expected[name] in told for name, told in failed.items()), failed
    assert done.stdout == f"0 of {len(expected)} passed\n"
    (folder,) = re.findall(r"console.log: (\S+)", done.stderr)
    return Path(folder)


@pytest.mark.slow
def test_a_trainer_that_does_not_restore_or_verify_fails(tmp_path: Path) -> None:
    fault = "the position in the text is not restored"
    expected = {**BROKEN[fault][3], "flipped-bit": "resumed from step 4, not 2"}
    words = [*only(*expected), "--checkpoint.verify=size"]
    kept = check_failures(drill(*words, package=broken(tmp_path, fault), folder=str(tmp_path)), expected)
    assert "resumed from step 4" in (kept / "resume" / "console.log").read_text()


@pytest.mark.slow
def test_each_other_fault_of_the_trainer_is_found(tmp_path: Path) -> None:
    faults = list(BROKEN)[1:]
    expected = {name: told for fault in faults for name, told in BROKEN[fault][3].items()}
    check_failures(drill(*only(*expected), package=broken(tmp_path, *faults), folder=str(tmp_path)), expected)
