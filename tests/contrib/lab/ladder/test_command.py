"""`titanlite ladder` trains a tiny ladder in real processes, and predicts."""

from __future__ import annotations

import contextlib
import io
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from tests.contrib.lab.ladder.made_up import TRUE, made_up
from tests.contrib.lab.ladder.test_rungs import target
from tests.contrib.lab.ladder.tiny import FLAGS, NAMES, PARAMETERS, TARGET, written
from tests.support.processes import titanlite
from tests.support.sweeps import rows, run_copy
from titanlite import exit_codes
from titanlite.cli.main import main
from titanlite.contrib.lab import members
from titanlite.contrib.lab.ladder import run as ladder_run
from titanlite.contrib.lab.ladder.run import predicted
from titanlite.contrib.lab.ladder.rungs import rungs
from titanlite.contrib.lab.members import Member, MemberResult


def ladder(*words: object) -> int:
    return main(["ladder", *map(str, words)])


@pytest.fixture(scope="module")
def ladder_runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A ladder: folder, and what the command printed."""
    folder = tmp_path_factory.mktemp("ladder")
    said = io.StringIO()
    with patch.object(members, "run", run_copy), contextlib.redirect_stdout(said):
        assert ladder(written(folder), "--folder", folder / "out", *FLAGS) == 0
    return folder, said.getvalue()


@pytest.mark.slow
def test_all_runs_give_points_with_their_last_validation(
    ladder_runs: tuple[Path, str],
) -> None:
    folder, said = ladder_runs
    result = json.loads((folder / "out" / "points.json").read_text())
    points = result["points"]
    assert [point["name"] for point in points] == list(NAMES)
    for point in points:
        figures = rows(folder / "out" / point["name"])
        last = dict(figures[-1])
        assert point["loss"] == last["validation_loss"]
        seen = [row["tokens_seen"] for row in map(dict, figures) if "tokens_seen" in row]
        assert point["tokens"] == seen[-1]
        assert point["trunk"] == point["name"].partition("-t")[0] + "-t0.04"
    sizes = [point["parameters"] for point in points]
    assert sizes == [size for size in PARAMETERS for _ in range(2)]
    found = result["prediction"]
    assert (found["parameters"], found["tokens"]) == (TARGET, 25600)
    assert found["low"] <= found["loss"] <= found["high"]
    assert "this file: N 127.3K, 25.6K tokens, loss " in said and "fewer than 9 points" in said
    assert json.loads((folder / "target" / "prediction.json").read_text()) == {
        "loss": result["loss"]
    }
    *before, end = result["loss"]["curve"]
    assert [point["step"] for point in before[:: len(before) - 1]] == [4, 100]
    assert (end["step"], end["loss"]) == (200, found["loss"])


@pytest.mark.slow
def test_a_branch_is_the_run_that_was_trained_for_its_horizon_alone(
    ladder_runs: tuple[Path, str],
) -> None:
    folder, _ = ladder_runs
    own = folder / "out" / NAMES[1]
    (flags,) = [rung.flags for rung in rungs(target(folder)) if rung.name == NAMES[1]]
    kept = [flag for flag in flags if "initial_load" not in flag and "checkpoint.start" not in flag]
    config = [str(written(folder)), *FLAGS, *kept, f"--job.dump_folder={folder / 'whole'}"]
    done = titanlite("train", *config)
    assert done.returncode == 0, done.stderr
    whole = rows(folder / "whole")
    branch = rows(own)
    assert dict(branch[0])["step"] == 8
    assert branch == whole[-len(branch) :]
    assert "validation_loss" in dict(branch[-1])


def test_runs_that_fail_are_named_and_too_few_end_with_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(members: Sequence[Member], *_: Any) -> list[MemberResult]:
        return [MemberResult(one.name, "failed", 0, None, "it broke") for one in members]

    monkeypatch.setattr(ladder_run, "run_members", run)
    code = ladder(written(tmp_path), "--folder", tmp_path / "out", *FLAGS)
    out = capsys.readouterr().out
    assert code == exit_codes.ERROR
    assert f"missing: {NAMES[0]}: failed. it broke" in out
    assert f"{NAMES[1]} was not started, since its trunk {NAMES[0]} is not done" in out
    assert "no law: 0 points of 0 sizes" in out


# Without runs


def test_the_curve_has_the_law_of_steps_before_the_decay(tmp_path):
    # Losses at a constant rate are a tenth higher.
    held = [replace(point, loss=1.1 * point.loss) for point in made_up(horizons=(0.02, 0.1, 0.2))]
    _, result = predicted(made_up(), target(tmp_path), held)
    *before, end = result["loss"]["curve"]
    assert before[0]["tokens"] == pytest.approx(0.02 * TARGET)
    assert before[-1]["tokens"] == pytest.approx(25600 / 2), "the decay takes the second half"
    for point in before:
        assert point["loss"] == pytest.approx(1.1 * TRUE.loss(TARGET, point["tokens"]), rel=1e-3)
        assert point["step"] == round(point["tokens"] / 128)
        assert point["low"] <= point["loss"] <= point["high"]
    assert end["loss"] == result["prediction"]["loss"] and end["step"] == 200
    assert predicted(made_up(), target(tmp_path))[1]["loss"]["curve"] == [end]


def test_a_length_on_the_command_line_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert ladder("debug_model.toml", "--training.tokens=5000") == exit_codes.CONFIG
    assert "write it into the file" in capsys.readouterr().err


def test_a_dry_run_shows_the_runs_and_starts_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert ladder(written(tmp_path), "--dry-run", *FLAGS) == 0
    out = capsys.readouterr().out
    assert f"continues {NAMES[4]} at step 8" in out
    assert "All runs together take 13 % of its FLOPs" in out
    assert [path.name for path in tmp_path.iterdir()] == ["target.toml"]
