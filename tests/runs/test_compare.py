"""`titanlite runs --compare`: the numbers, and what differs."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.run_folders import Start, change_start, training_row, write_metrics
from titanlite.cli.comparison import compare, read_runs, steady
from titanlite.cli.main import main
from titanlite.runs.read import read_run


@pytest.fixture
def two(tmp_path: Path, start: Start) -> list[Path]:
    """Run a logs every 10 steps to 40, run b every 20 to 60 and is twice as fast; the first rows
    are far off.
    """
    a = [training_row(1, 8.0, 1), training_row(10, 7.0, 2)]
    a += [
        training_row(step, 8 - step / 10, tps, mfu=tps / 5)
        for step, tps in ((20, 100), (30, 130), (40, 110))
    ]
    a += [{"step": 40, "time": 2e6, "validation_loss": 4.5}]
    b = [training_row(1, 8.0, 900), training_row(20, 5.5, 900)]
    b += [training_row(40, 4.25, 220, mfu=44, memory_gib=2.0), training_row(60, 3.0, 222, mfu=45)]
    b += [
        {"step": 40, "time": 2e6, "validation_loss": 4.75},
        {"step": 60, "time": 2e6, "validation_loss": 3.5},
    ]
    folders = [write_metrics(tmp_path / "runs" / "a", a), write_metrics(tmp_path / "runs" / "b", b)]
    start(folders[0], 0.001).end("done", 40)
    start(folders[1], 0.002, "[model.overrides]\nn_layers = 4\n").end("done", 60)
    return folders


def test_medians_leave_out_first_rows_and_losses_stand_at_equal_steps(two: list[Path]) -> None:
    found = compare(read_runs(two))
    values = {figure.name: figure.values for figure in found.figures}
    assert values["tokens/s per device"] == [110, 221]
    assert values["tokens/s"] == [pytest.approx(220), pytest.approx(442)]
    assert values["MFU %"] == [22, 44.5]
    assert values["memory GiB, peak"] == [1.5, 2.0]
    losses = {name: two for name, two in values.items() if name.startswith("loss")}
    assert losses == {
        "loss at step 1": [8.0, 8.0],
        "loss at step 20": [6.0, 5.5],
        "loss at step 40": [4.0, 4.25],
    }
    assert values["validation loss at step 40"] == [4.5, 4.75]
    cells = {figure.name: figure.cells() for figure in found.figures}
    assert cells["tokens/s per device"] == ["110", "221 (2.01×)"]
    assert cells["loss at step 40"] == ["4.0000", "4.2500 (+0.2500)"]


def test_few_common_steps_stand_once_and_in_order(tmp_path: Path) -> None:
    rows = [{"step": step, "loss": 9.0 - step, "lr": 1e-3} for step in (1, 2)]
    folders = [write_metrics(tmp_path / name, rows) for name in ("a", "b")]
    names = [figure.name for figure in compare(read_runs(folders)).figures]
    assert [name for name in names if "loss" in name] == ["loss at step 1", "loss at step 2"]


def test_config_keys_and_circumstances_that_differ_are_named(two: list[Path]) -> None:
    keys = {"optimizer.lr": (0.001, 0.002), "model.overrides.n_layers": (None, 4)}
    assert compare(read_runs(two)).differences == keys
    environment = {"NCCL_ALGO": "Ring", "SLURM_NODEID": "3"}
    git = {"commit": "d" * 40, "dirty": True}
    change_start(two[1], 1, ranks=8, git=git, versions={"torch": "9.9"}, environment=environment)
    differences = {name: values[1] for name, values in compare(read_runs(two)).differences.items()}
    expected = {
        "ranks": 8,
        "git commit": "d" * 40,
        "version of torch": "9.9",
        "NCCL_ALGO": "Ring",
    }
    assert expected.items() <= differences.items()
    assert "SLURM_NODEID" not in differences


def test_the_first_rows_of_every_attempt_are_left_out(tmp_path: Path, start: Start) -> None:
    start(tmp_path).end("failed", 40)
    start(tmp_path, step=40).end("done", 80)
    change_start(tmp_path, 1, time="1970-01-12T13:46:40.000+00:00")  # second 1,000,000
    change_start(tmp_path, 2, time="1970-01-12T13:47:25.000+00:00")  # 45 seconds later
    write_metrics(
        tmp_path, [training_row(step, 5.0) for step in (1, 10, 20, 30, 40, 50, 60, 70, 80)]
    )
    assert [row["step"] for row in steady(read_run(tmp_path))] == [20, 30, 40, 70, 80]
    two_rows = write_metrics(tmp_path / "two", [training_row(1, 5.0), training_row(10, 5.0)])
    assert [row["step"] for row in steady(read_run(two_rows))] == [10]


def test_the_command_prints_the_tables(two: list[Path], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["runs", "--compare", *map(str, two)]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert "\x1b[" not in out
    assert re.search(r"^tokens/s +220 +442 \(2\.01×\)$", out, re.MULTILINE)
    assert re.search(r"^optimizer.lr +0.001 +0.002$", out, re.MULTILINE)


def test_what_keeps_runs_from_being_compared_is_said(tmp_path: Path) -> None:
    a = write_metrics(tmp_path / "a", [training_row(step, 5.0) for step in (3, 6, 9)])
    b = write_metrics(tmp_path / "b", [training_row(step, 5.0) for step in (5, 10)])
    notes = "\n".join(compare(read_runs([a, b])).notes)
    assert "no step was logged by all runs: metrics.log_freq" in notes


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda f: None, "there is no such folder; `titanlite runs FOLDER` lists"),
        (
            lambda f: write_metrics(f, []),
            "metrics.jsonl has no training step yet; wait for its first logged step",
        ),
        (
            lambda f: (write_metrics(f, []) / "config.toml").write_text("= 1"),
            "config.toml: not TOML (",
        ),
    ],
)
def test_errors_name_the_file_and_what_to_do(
    make: Callable[[Path], object],
    message: str,
    two: list[Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    make(tmp_path / "wrong")
    assert main(["runs", "--compare", str(two[0]), str(tmp_path / "wrong")]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"error: {tmp_path}/wrong")
    assert message in err


def test_an_earlier_run_of_the_folder_is_compared_by_its_metrics_file(two: list[Path]) -> None:
    write_metrics(two[0], [training_row(step, 6.5) for step in (1, 20, 40)], "metrics-1.jsonl")
    found = compare(read_runs([two[0], two[0] / "metrics-1.jsonl"]))
    assert {f.name: f.values for f in found.figures}["loss at step 40"] == [4.0, 6.5]
    assert found.runs[1].attempts == ()


def test_options_that_do_not_go_together_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["runs", "--compare"]) == 2
    assert "--compare: needs the folders of runs" in capsys.readouterr().err
