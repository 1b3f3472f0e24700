"""`titanlite sweep`: its points, its runs, its table, its files and its exit code."""

from __future__ import annotations

import json
import os
import shlex
from pathlib import Path
from typing import Any

import pytest

from tests.support.processes import ROOT, titanlite
from tests.support.sweeps import CALLBACKS, STEPS, rows
from titanlite import exit_codes
from titanlite.cli.main import main
from titanlite.config.errors import ConfigError
from titanlite.config.load import read
from titanlite.contrib.lab.members import MemberResult
from titanlite.contrib.lab.sweep import members_of, points_of, report
from titanlite.runs.lock import RunLock

HEAD = f"""
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
"""
RATES = '"optimizer.lr" = [1e-3, 1e-2, 1e9]\n'


def points(table: str, folder: Path) -> list[dict[str, Any]]:
    """The points of a table [sweep]."""
    file = folder / "points.toml"
    file.write_text(f"[sweep]\n{table}")
    config, problems = read([f"--job.config_file={file}"], defer=True)
    assert problems == [] and config.sweep is not None
    return [dict(point) for point in points_of(config.sweep)]


def result(name: str, loss: float | None, state: str = "done") -> MemberResult:
    reason = "" if state == "done" else "it broke"
    return MemberResult(name, state, 8, loss, reason)


def test_lists_are_a_grid_and_points_change_keys_together(tmp_path):
    table = 'optimizer.lr = [1e-3, 1e-2]\n"training.seed" = [0, 1]\n'
    found = points(table, tmp_path)
    assert [tuple(point.values()) for point in found] == [
        (0.001, 0),
        (0.001, 1),
        (0.01, 0),
        (0.01, 1),
    ]
    members = members_of(found)
    assert members[1].name == "lr=0.001,seed=1"
    assert members[1].flags == ["--optimizer.lr=0.001", "--training.seed=1"]
    table = '"optimizer.lr" = [1, 2]\n[[sweep.points]]\nmodel.overrides.dim = 32\n'
    table += '[[sweep.points]]\nmodel.overrides.dim = 64\n"optimizer.eps" = 1e-6\n'
    assert [member.name for member in members_of(points(table, tmp_path))] == [
        "dim=32,lr=1",
        "dim=32,lr=2",
        "dim=64,eps=1e-06,lr=1",
        "dim=64,eps=1e-06,lr=2",
    ]


def test_names_are_folders_that_differ_and_hide_secrets(tmp_path):
    urls = [f"https://ada:{word}@example.org/text" for word in ("hunter2", "hunter3")]
    table = f'"training.dataset_path" = {json.dumps([*urls, "x" * 300, "../up"])}\n'
    names = [member.name for member in members_of(points(table, tmp_path))]
    assert len(set(names)) == 4
    for name in names:
        assert "hunter" not in name
        assert Path(name).name == name and len(name) < 200


@pytest.mark.parametrize(
    ("table", "wanted"),
    [
        ("", r"\[sweep\]: a point sets no key"),
        ('"optimizer.lr" = 1e-3\n', r"lr: expected a list of values, got 0\.001"),
        ('"job.dump_folder" = ["a", "b"]\n', "each run has its own folder"),
        (
            '"optimizer.lr" = [1]\n[[sweep.points]]\n"optimizer.lr" = 2\n',
            "optimizer.lr: is varied twice",
        ),
    ],
)
def test_what_is_wrong_in_the_table_is_refused(table, wanted, tmp_path):
    with pytest.raises(ConfigError, match=wanted):
        points(table, tmp_path)


@pytest.mark.parametrize(
    ("table", "words", "wanted"),
    [
        (RATES.replace("lr", "lrr"), [], "optimizer.lrr: unknown key"),
        (RATES, ["--optimizer.lr=1"], "the table [sweep] varies it"),
        (RATES.replace("1e9", "0.01"), [], "the point lr=0.01 is given twice"),
        (
            '"training.global_batch_size" = [3, 4]\n',
            [],
            "global_batch_size=3 cannot start; nothing was started\n",
        ),
    ],
)
def test_points_that_cannot_run_are_told_before_anything_is_written(
    table, words, wanted, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny.toml").write_text(HEAD + table)
    assert main(["sweep", "tiny.toml", *words]) == exit_codes.CONFIG
    assert wanted in capsys.readouterr().err
    assert os.listdir(tmp_path) == ["tiny.toml"]


def test_a_dry_run_and_a_second_sweep_in_a_folder_change_nothing(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny.toml").write_text(HEAD + RATES)
    assert main(["sweep", "tiny.toml", "--dry-run"]) == exit_codes.DONE
    names = ["lr=0.001", "lr=0.01", "lr=1e+09"]
    wanted = [f"outputs/debug_model-sweep/{name}" for name in names]
    assert capsys.readouterr().out.splitlines() == wanted
    assert os.listdir(tmp_path) == ["tiny.toml"]
    with RunLock(tmp_path / "outputs" / "debug_model-sweep", "folder"):
        assert main(["sweep", "tiny.toml"]) == exit_codes.CHECKPOINT
        assert os.listdir(tmp_path / "outputs" / "debug_model-sweep") == ["run.lock"]
    assert "give this run another --folder" in capsys.readouterr().err


def test_the_table_has_the_lowest_loss_first_and_a_failure_is_an_error(tmp_path):
    found = [{"lr": rate} for rate in (0.001, 0.01, 0.1)]
    results = [result("a", 3.5), result("b", 2.25), result("c", 1.0, "failed")]
    text, code = report(found, results, tmp_path)
    lines = [line.split() for line in text.splitlines()]
    assert [line[0] for line in lines[:4]] == ["lr", "0.01", "0.001", "0.1"]
    assert lines[1] == ["0.01", "2.2500", "done"]
    assert "c failed: it broke" in text
    assert f"best: titanlite train {tmp_path}/b/config.toml" in text
    assert code == exit_codes.ERROR
    assert report(found[:2], results[:2], tmp_path)[1] == exit_codes.DONE
    diverged = result("c", None, "diverged")
    assert report(found, [*results[:2], diverged], tmp_path)[1] == exit_codes.DONE


def test_the_results_of_a_sweep_hide_secrets(tmp_path):
    url = "https://ada:hunter2@example.org/text"
    report([{"dataset_path": url, "lr": 0.1}], [result("a", 3.5)], tmp_path)
    text = (tmp_path / "results.json").read_text()
    assert "hunter2" not in text and "example.org/text" in text


@pytest.mark.slow
def test_a_sweep_trains_each_point_and_names_the_best(tmp_path):
    (tmp_path / "tiny.toml").write_text(HEAD + RATES.replace(", 1e9", ""))
    done = titanlite("sweep", "tiny.toml", cwd=tmp_path)
    assert done.returncode == exit_codes.DONE, done.stderr
    # job.dump_folder of the debug model is ./outputs/debug_model.
    own = tmp_path / "outputs" / "debug_model-sweep"
    found = json.loads((own / "results.json").read_text())
    losses = {run["name"]: run["loss"] for run in found["runs"]}
    assert list(losses) == ["lr=0.01", "lr=0.001"]
    for name in ("lr=0.01", "lr=0.001"):
        assert losses[name] == dict(rows(own / name)[-1])["validation_loss"]
    lines = done.stdout.splitlines()
    assert lines[1].split()[:2] == ["0.01", f"{losses['lr=0.01']:.4f}"]
    (best,) = [line for line in lines if line.startswith("best: titanlite ")]
    *words, file, _ = shlex.split(best.removeprefix("best: titanlite "))
    assert words == ["train"]
    assert (tmp_path / file).read_text() == (own / "lr=0.01" / "config.toml").read_text()
