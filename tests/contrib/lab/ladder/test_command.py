"""`titanlite ladder` trains a tiny ladder in real processes, goes on after a kill, and predicts."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.contrib.lab.ladder.made_up import HORIZONS, SIZES, TRUE, made_up
from tests.contrib.lab.ladder.test_rungs import target
from tests.contrib.lab.ladder.tiny import FLAGS, NAMES, PARAMETERS, TARGET, written
from tests.support.processes import ROOT, ended, environment, titanlite
from tests.support.sweeps import CALLBACKS, attempts, rows
from titanlite import exit_codes
from titanlite.cli.main import main
from titanlite.config.load import read
from titanlite.contrib.lab.ladder.climb import predicted
from titanlite.contrib.lab.ladder.rungs import rungs

SLOW = f"--job.callbacks={CALLBACKS}:SlowSteps"


def ladder(*words: object) -> int:
    return main(["ladder", *map(str, words)])


def wait_for(file: Path) -> None:
    deadline = time.monotonic() + 300
    while not file.exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.fixture(scope="module")
def climbed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """A ladder that was killed in its second trunk and started again: folder, and the records of
    the runs that were done before.
    """
    folder = tmp_path_factory.mktemp("ladder")
    words = ["ladder", str(written(folder)), "--folder", str(folder / "out"), SLOW, *FLAGS]
    process = subprocess.Popen(
        [sys.executable, "-m", "titanlite", *words],
        cwd=ROOT,
        env=environment(STEP_SECONDS="0.1"),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    second = folder / "out" / NAMES[2]
    wait_for(second / "checkpoint" / "step-7" / "manifest.json")
    holder = int(json.loads((second / "run.lock").read_text())["process"]["id"])
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert ended(holder)
    before = [attempts(folder / "out" / NAMES[0])]
    code = subprocess.run(
        [sys.executable, "-m", "titanlite", *words],
        cwd=ROOT,
        env=environment(),
        stdout=(folder / "said").open("w"),
        stderr=subprocess.STDOUT,
        check=False,
    ).returncode
    assert code == 0, (folder / "said").read_text()
    return folder, before


@pytest.fixture(scope="module")
def result(climbed: tuple[Path, list[str]]) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((climbed[0] / "out" / "points.json").read_text())
    return found


@pytest.mark.slow
def test_a_killed_ladder_goes_on_where_it_was(climbed: tuple[Path, list[str]]) -> None:
    folder, before = climbed
    assert attempts(folder / "out" / NAMES[0]) == before[0]
    steps = [dict(row)["step"] for row in rows(folder / "out" / NAMES[2]) if "loss" in dict(row)]
    assert steps == list(range(1, 28))
    assert "resumed from step" in (folder / "out" / NAMES[2] / "console.log").read_text()


@pytest.mark.slow
def test_all_runs_give_points_with_their_last_validation(
    climbed: tuple[Path, list[str]], result: dict[str, Any]
) -> None:
    points = result["points"]
    assert [point["name"] for point in points] == list(NAMES)
    for point in points:
        figures = rows(climbed[0] / "out" / point["name"])
        last = dict(figures[-1])
        assert point["loss"] == last["validation_loss"]
        seen = [row["tokens_seen"] for row in map(dict, figures) if "tokens_seen" in row]
        assert point["tokens"] == seen[-1]
        assert point["trunk"] == point["name"].partition("-t")[0] + "-t0.04"
    sizes = [point["parameters"] for point in points]
    assert sizes == [size for size in PARAMETERS for _ in range(2)]


@pytest.mark.slow
def test_a_branch_is_the_run_that_was_trained_for_its_horizon_alone(
    climbed: tuple[Path, list[str]],
) -> None:
    folder, _ = climbed
    own = folder / "out" / NAMES[1]
    (flags,) = [rung.flags for rung in rungs(target(folder, SLOW)) if rung.name == NAMES[1]]
    kept = [flag for flag in flags if "initial_load" not in flag and "checkpoint.start" not in flag]
    config = [str(written(folder)), *FLAGS, *kept, f"--job.dump_folder={folder / 'whole'}"]
    done = titanlite("train", *config)
    assert done.returncode == 0, done.stderr
    whole = rows(folder / "whole")
    branch = rows(own)
    assert dict(branch[0])["step"] == 8
    assert branch == whole[-len(branch) :]
    assert "validation_loss" in dict(branch[-1])


@pytest.mark.slow
def test_the_report_predicts_the_file_and_checks_itself(
    climbed: tuple[Path, list[str]], result: dict[str, Any]
) -> None:
    said = (climbed[0] / "said").read_text()
    found = result["prediction"]
    assert (found["parameters"], found["tokens"]) == (TARGET, 25600)
    assert found["low"] <= found["loss"] <= found["high"]
    line = next(line for line in said.splitlines() if line.startswith("this file: "))
    assert re.fullmatch(
        r"this file: N 127\.3K, 25\.6K tokens, loss \d\.\d+ ± \d+\.\d+ \(90%\)", line
    )
    assert "fewer than 9 points" in said
    for name in NAMES:
        assert name in said


def test_a_run_reads_none_of_the_table_and_says_so(tmp_path: Path) -> None:
    from titanlite.run.derive import derive

    config, problems = read([f"--job.config_file={written(tmp_path)}"])
    assert problems == []
    notes = [note for note in derive(config, 1).notes if "[ladder]" in note]
    assert notes == ["[ladder] is for `titanlite ladder`; a run reads none of it"]


@pytest.mark.slow
def test_runs_that_fail_are_named_and_too_few_end_with_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = written(tmp_path)
    breaks = f"--job.callbacks={CALLBACKS}:Breaks"
    code = ladder(file, "--folder", tmp_path / "out", breaks, *FLAGS)
    out = capsys.readouterr().out
    assert code == exit_codes.ERROR
    assert f"missing: {NAMES[0]}: failed" in out
    assert f"{NAMES[1]} was not started, since its trunk {NAMES[0]} is not done" in out
    assert "no law: 0 points of 0 sizes" in out
    assert not (tmp_path / "out" / "points.json").exists()


# Without runs


def test_the_report_has_the_law_its_check_and_the_loss_of_the_file(tmp_path: Path) -> None:
    out, _ = predicted(made_up(), target(tmp_path))
    loss = TRUE.loss(TARGET, 25600)
    line = rf"this file: N 127\.3K, 25\.6K tokens, loss {loss:.5f} ± 0\.0000\d \(90%\)"
    assert re.fullmatch(line, out.splitlines()[-1])
    assert "L(N, D) = 1.8 + 480 / N^0.350 + 2100 / D^0.370" in out
    assert "check: without the largest model its loss in n160000000-t20 is predicted as" in out
    assert out.count("+0.00") + out.count("-0.00") >= len(SIZES) * len(HORIZONS)


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
