"""`titanlite sweep` from a file to its table, its files and its exit code."""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path

import pytest

from tests.support.processes import ROOT, python, titanlite
from tests.tools.sweep.sweeps import CALLBACKS, STEPS, attempts, rows
from titanlite import exit_codes
from titanlite.runs.lock import RunLock
from titanlite.tools.cli import main

FILE = f"""
[job]
extends = ["{ROOT / "train_configs" / "debug_model.toml"}"]
callbacks = ["{CALLBACKS}:SlowSteps"]

[model.overrides]
n_layers = 2
dim = 32
n_heads = 2

[training]
batch_size = 2
seq_len = 16
steps = {STEPS}
warmup_steps = 2

[validation]
freq = 4
steps = 1
batch_size = 2
seq_len = 16

[metrics]
log_freq = 1

[sweep]
"optimizer.lr" = [1e-3, 1e-2, 1e9]
"""


@pytest.fixture(scope="module")
def swept(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A folder with a file and its sweep, and what the command printed."""
    folder = tmp_path_factory.mktemp("swept")
    (folder / "tiny.toml").write_text(FILE)
    done = titanlite("sweep", "tiny.toml", "--at-once", 2, cwd=folder)
    assert done.returncode == exit_codes.DONE, done.stderr
    return folder, done.stdout


@pytest.mark.slow
def test_a_sweep_prints_a_table_and_writes_its_files(swept: tuple[Path, str]) -> None:
    folder, printed = swept
    # job.dump_folder of the debug model is ./outputs/debug_model.
    own = folder / "outputs" / "debug_model-sweep"
    results = json.loads((own / "results.json").read_text())
    losses = {run["name"]: run["validation_loss"] for run in results["runs"]}
    assert results["best"] == "lr=0.01"
    assert losses["lr=0.01"] < losses["lr=0.001"]
    lines = printed.splitlines()
    assert lines[0] == "debug_model-sweep"
    assert lines[3].split()[:3] == ["*", "0.01", f"{losses['lr=0.01']:.4f}"]
    assert lines[4].split()[-1] == "diverged"
    assert f"best: lr = 0.01, validation loss {losses['lr=0.01']:.4f}" in lines
    assert "lr=1e+09 diverged after step 2: step 3: loss nan" in printed
    assert (own / "sweep.svg").read_text().startswith("<svg")


def test_the_best_file_trains_to_the_same_losses(swept: tuple[Path, str]) -> None:
    folder, _ = swept
    own = Path("outputs") / "debug_model-sweep"
    done = titanlite("train", own / "best.toml", cwd=folder)
    assert done.returncode == 0, done.stderr
    assert rows(folder / own / "best") == rows(folder / own / "lr=0.01")
    assert "[sweep]" not in (folder / own / "best.toml").read_text()


def test_show_prints_the_same_table_and_runs_nothing(
    swept: tuple[Path, str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, printed = swept
    monkeypatch.chdir(folder)
    own = folder / "outputs" / "debug_model-sweep"
    before = attempts(own / "lr=0.001")
    assert main(["sweep", "--show", "outputs/debug_model-sweep"]) == exit_codes.DONE
    assert capsys.readouterr().out == printed
    assert attempts(own / "lr=0.001") == before


def test_a_damaged_record_of_the_best_run_costs_its_file_alone(
    swept: tuple[Path, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, printed = swept
    own = tmp_path / "copy"
    shutil.copytree(folder / "outputs" / "debug_model-sweep", own)
    (own / "best.toml").unlink()
    config = own / "lr=0.01" / "config.toml"
    config.write_text(config.read_text() + "[nonsense]\n")
    assert main(["sweep", "--show", str(own)]) == exit_codes.DONE
    shown = capsys.readouterr().out
    assert shown.splitlines()[1:5] == printed.splitlines()[1:5]
    assert "best.toml is not written, since the record of its run is damaged" in shown
    assert "[nonsense]: unknown section" in shown
    assert not (own / "best.toml").exists()


@pytest.mark.slow
def test_a_second_sweep_runs_only_new_points_and_names_the_old_ones(
    swept: tuple[Path, str], tmp_path: Path
) -> None:
    folder, _ = swept
    own = tmp_path / "copy"
    shutil.copytree(folder / "outputs" / "debug_model-sweep", own)
    before = attempts(own / "lr=0.01")
    file = tmp_path / "tiny.toml"
    file.write_text(FILE.replace("[1e-3, 1e-2, 1e9]", "[1e-2, 3e-2]"))
    done = titanlite("sweep", file, "--folder", own, "--json", cwd=folder)
    assert done.returncode == 0, done.stderr
    assert "1 of 2 runs are in" in done.stderr
    assert attempts(own / "lr=0.01") == before
    assert [run["name"] for run in json.loads(done.stdout)["runs"]] == ["lr=0.01", "lr=0.03"]
    shown = titanlite("sweep", "--show", own)
    assert "of another sweep in this folder: lr=0.001, lr=1e+09\n" in shown.stdout


def test_a_dry_run_prints_points_and_tokens_and_writes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny.toml").write_text(FILE)
    words = ["sweep", "tiny.toml", "--dry-run", "--nproc-per-node", "2", "--training.steps=10"]
    assert main(words) == exit_codes.DONE
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["run", "point", "parameters", "steps", "tokens"]
    assert lines[2].split() == ["1", "lr=0.01", "205.0K", "10", "640"]
    assert lines[-1].startswith("3 runs of 2 ranks, 1.9K tokens, ")
    assert lines[-1].endswith("folder: outputs/debug_model-sweep")
    assert main([*words, "--json"]) == exit_codes.DONE
    found = json.loads(capsys.readouterr().out)
    assert found["runs"][1]["name"] == "lr=0.01"
    assert [run["tokens"] for run in found["runs"]] == [640, 640, 640]
    assert os.listdir(tmp_path) == ["tiny.toml"]


@pytest.mark.parametrize(
    "words",
    [
        ["--show=x", "--folder=y"],
        ["--show=x", "--at-once=2"],
        ["tiny.toml", "--dry-run", "--at-once=2"],
        ["tiny.toml", "--member=0", "--json"],
    ],
)
def test_an_option_without_effect_is_refused(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["sweep", *words]) == exit_codes.CONFIG
    assert "has no effect with --" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "words", "wanted"),
    [
        ("optimizer.lrr", [], '[sweep] "optimizer.lrr": unknown key'),
        ("optimizer.lr", ["--optimizer.lr=1"], "optimizer.lr cannot be set here"),
        ("optimizer.lr", ["--training.seq_len=-1"], "training.seq_len: expected"),
        ("optimizer.lr", ["--member=3"], "--member: expected a number below 3, that of the runs"),
        ("optimizer.lr", ["--show=x"], "takes the folder of a sweep, and no config file"),
        (
            "training.global_batch_size",
            [],
            "3 of 3 runs cannot start; nothing was started\n  global_batch_size=3:",
        ),
    ],
)
def test_what_is_wrong_is_told_before_anything_is_written(
    change: str,
    words: list[str],
    wanted: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    text = FILE.replace('"optimizer.lr"', f'"{change}"')
    if change == "training.global_batch_size":
        text = text.replace("[1e-3, 1e-2, 1e9]", "[3, 5, 7]")
    (tmp_path / "tiny.toml").write_text(text)
    assert main(["sweep", "tiny.toml", *words]) == exit_codes.CONFIG
    assert wanted in capsys.readouterr().err
    assert os.listdir(tmp_path) == ["tiny.toml"]


def test_a_metric_that_no_run_has_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny.toml").write_text(FILE + 'metric = "best_validation_loss"\n')
    assert main(["sweep", "tiny.toml", "--no-validation.enable"]) == exit_codes.CONFIG
    assert "validation is off for lr=0.001, so it has no best_validation_loss" in (
        capsys.readouterr().err
    )


def test_a_sweep_of_other_points_changes_nothing_while_one_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny.toml").write_text(FILE)
    with RunLock(tmp_path / "outputs" / "debug_model-sweep", "folder"):
        assert main(["sweep", "tiny.toml"]) == exit_codes.CHECKPOINT
        assert os.listdir(tmp_path / "outputs" / "debug_model-sweep") == ["run.lock"]
    assert "give this run another --folder" in capsys.readouterr().err


@pytest.mark.slow
def test_a_member_alone_trains_as_in_the_sweep(swept: tuple[Path, str], tmp_path: Path) -> None:
    folder, _ = swept
    own = folder / "outputs" / "debug_model-sweep"
    words = ["sweep", folder / "tiny.toml", "--folder", tmp_path / "s"]
    done = titanlite(*words, "--member", 1)
    assert done.returncode == 0, done.stderr
    assert rows(tmp_path / "s" / "lr=0.01") == rows(own / "lr=0.01")
    again = titanlite(*words, "--member", 1)
    assert (again.returncode, again.stderr) == (0, "lr=0.01 is done already\n")
    assert titanlite(*words, "--member", 2).returncode == exit_codes.GUARD
    shown = titanlite("sweep", "--show", tmp_path / "s")
    assert shown.returncode == exit_codes.ERROR
    assert [line.split()[-1] for line in shown.stdout.splitlines()[2:5]] == [
        "unfinished",
        "done",
        "diverged",
    ]


@pytest.mark.slow
def test_a_member_alone_has_its_ranks(swept: tuple[Path, str], tmp_path: Path) -> None:
    folder, _ = swept
    words = ["sweep", folder / "tiny.toml", "--folder", tmp_path, "--member", 0]
    done = titanlite(*words, "--nproc-per-node", 2)
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "sweep.json").read_text())["ranks"] == 2
    assert rows(tmp_path / "lr=0.001")[-1][0] == ("step", STEPS)
    own = python("-m", "titanlite.torchrun", "--nproc_per_node=2", "-m", "titanlite", *words)
    assert own.returncode == 0, own.stderr
    assert "lr=0.001 is done already" in own.stderr
    words[-1] = 1
    ranks = ["--nproc_per_node=2", "--rdzv_backend=c10d", "--rdzv_endpoint=localhost:0"]
    done = python("-m", "titanlite.torchrun", *ranks, "-m", "titanlite", *words)
    assert done.returncode == 0, done.stderr
    assert '"ranks": 2' in attempts(tmp_path / "lr=0.01")


def test_the_best_config_of_a_foreign_folder_holds_names_of_variables(
    swept: tuple[Path, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Somebody else's folder cannot draw a secret into a file, and its code does not run."""
    folder, _ = swept
    own = tmp_path / "copy"
    shutil.copytree(folder / "outputs" / "debug_model-sweep", own)
    (own / "best.toml").unlink()
    ran = tmp_path / "ran"
    evil = own / "lr=0.01" / "evil.py"
    evil.write_text(f"open({str(ran)!r}, 'w')\n")
    config = own / "lr=0.01" / "config.toml"
    found = re.sub(r"(?m)^description = .*$", 'description = "${SECRET}"', config.read_text())
    found = re.sub(r"(?m)^loss = .*$", f'loss = "{evil}:make"', found)
    assert "${SECRET}" in found
    assert "evil.py" in found
    config.write_text(found)
    monkeypatch.setenv("SECRET", "hunter2")
    assert main(["sweep", "--show", str(own)]) == exit_codes.DONE
    written = (own / "best.toml").read_text()
    assert "hunter2" not in written
    assert "${SECRET}" in written
    assert not ran.exists()
