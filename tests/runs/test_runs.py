"""`titanlite runs`, and reading run folders."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tests.support.run_folders import Start, change_start, training_row, write_metrics
from titanlite.cli.main import main
from titanlite.runs.lock import RunLock
from titanlite.runs.read import find_runs, read_run


def listed(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    status = main(["runs", *words])
    out, err = capsys.readouterr()
    return status, out, err


def test_the_table_has_every_run_with_its_state_and_figures(
    tmp_path: Path, start: Start, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [
        training_row(1, 8.0, 50),
        training_row(20, 5.25, 110),
        {"step": 20, "time": 1.0, "validation_loss": 5.5},
    ]
    write_metrics(tmp_path / "a" / "one", rows)
    start(tmp_path / "a" / "one").end("done", 40)
    write_metrics(tmp_path / "two", rows)
    with RunLock(tmp_path / "three"):
        record = start(tmp_path / "three")
        status, out, err = listed(capsys, str(tmp_path))
    assert (status, err) == (0, "")
    lines = {line.split()[0].rpartition("/")[2]: line.split()[1:] for line in out.splitlines()}
    assert lines["one"][:7] == ["done", "40", "of", "40", "5.2500", "5.5000", "220"]
    assert lines["two"][:5] == ["unknown", "20", "5.2500", "5.5000", "220"]
    assert lines["three"][:7] == ["running", "0", "of", "40", "–", "–", "–"]
    assert "died" in listed(capsys, str(tmp_path / "three"))[1], (
        "its lock is gone, and it has no end"
    )
    record.end("stopped", 7, reason="step 8: loss nan")
    out = listed(capsys, str(tmp_path))[1]
    assert "three  stopped by guard   7 of 40" in out
    assert out.endswith(f"note: {tmp_path}/three: stopped by guard: step 8: loss nan\n")


def test_json_has_null_for_what_is_not_known_and_stays_json(
    tmp_path: Path, start: Start, capsys: pytest.CaptureFixture[str]
) -> None:
    write_metrics(tmp_path / "one", [training_row(1, 8.0, 50), training_row(20, "nan", 110)])
    start(tmp_path / "one").end("failed", 21, reason="OSError: disk")
    write_metrics(
        tmp_path / "two",
        [training_row(1, 8.0, 50, time=100.0), training_row(2, 7.0, 50, time=103.5)],
    )
    found = json.loads(listed(capsys, str(tmp_path), "--json")[1])
    one, two = sorted(found, key=lambda run: run["run"])
    assert one["loss"] == "nan"
    assert (one["state"], one["step"], one["steps"]) == ("failed", 21, 40)
    assert (one["tokens_per_second"], one["tokens_per_second_per_device"]) == (
        pytest.approx(220),
        110,
    )
    assert (one["reason"], one["attempts"], one["validation_loss"]) == ("OSError: disk", 1, None)
    shown = [two[key] for key in ("state", "steps", "started", "duration", "attempts")]
    assert shown == ["unknown", None, 100, 3.5, 0]


def test_time_between_attempts_does_not_count(tmp_path: Path, start: Start) -> None:
    start(tmp_path).end("failed", 10)
    start(tmp_path, step=10)
    start(tmp_path, step=10).end("done", 40)
    at = "2026-01-02T03:00:{:02}.000+00:00".format
    change_start(tmp_path, 1, time=at(0), ended=at(30))
    change_start(tmp_path, 2, time=at(40))
    change_start(tmp_path, 3, time=at(50), ended=at(59))
    began = read_run(tmp_path).started
    assert began is not None and read_run(tmp_path).duration == 39, (
        "nothing is known of the killed attempt"
    )
    write_metrics(
        tmp_path, [training_row(11, 5.0, time=began + 44), training_row(12, 5.0, time=began + 55)]
    )
    assert read_run(tmp_path).duration == 43, "it lasted at least until its last row"


def test_a_live_run_lasts_until_its_last_sign_of_life(tmp_path: Path, start: Start) -> None:
    with RunLock(tmp_path):
        start(tmp_path)
        started = read_run(tmp_path).started
        assert started is not None
        os.utime(tmp_path / "run.lock", (0, started + 70))
        run = read_run(tmp_path)
        assert (run.state, run.duration) == ("running", pytest.approx(70))


def test_a_run_begun_anew_in_the_folder_is_not_mixed_with_the_one_before(
    tmp_path: Path, start: Start
) -> None:
    start(tmp_path).end("done", 40)
    start(tmp_path).end("failed", 5)
    run = read_run(tmp_path)
    assert (run.state, run.step, len(run.attempts)) == ("failed", 5, 1)


def test_runs_are_found_a_few_levels_deep_and_not_inside_checkpoints(tmp_path: Path) -> None:
    for name in ("", "a/b/c", "a/b/c/d/e", "x/checkpoint/step-10", "x/.hidden", "x/step-20"):
        write_metrics(tmp_path / name, [training_row(1, 8.0)])
    (tmp_path / "a" / "circle").symlink_to(tmp_path)
    assert find_runs(tmp_path) == [tmp_path, tmp_path / "a/b/c"]


def test_names_with_control_characters_make_no_line_and_turn_no_text(
    tmp_path: Path, start: Start, capsys: pytest.CaptureFixture[str]
) -> None:
    names = ["a\nfake  done  40 of 40", "b\u202eexe.nur", "c\x1b[2J", "d\tx", "e\u2028y", "f\udcff"]
    for name in names:
        write_metrics(tmp_path / name, [training_row(1, 8.0)])
    start(tmp_path / names[0]).end("failed", 2, reason="disk\nnote: all is well\u2066")
    out = listed(capsys, str(tmp_path))[1] + listed(capsys, str(tmp_path), "--attempts")[1]
    assert not [character for character in out if character != "\n" and not character.isprintable()]
    assert not [line for line in out.splitlines() if line.startswith(("fake", "note: all", "y"))]
    for shown in (
        "a\\x0afake",
        "b\\u202eexe",
        "c\\x1b[2J",
        "d\\x09x",
        "e\\u2028y",
        "f\\udcff",
        "disk\\x0anote: all",
    ):
        assert shown in out
