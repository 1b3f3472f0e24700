"""`titanlite runs`, and reading run folders."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.run_folders import (
    EPOCH,
    begin,
    change_start,
    end,
    training_row,
    write_metrics,
    written,
)
from titanlite.cli.main import main
from titanlite.runs import ATTEMPTS
from titanlite.runs.attempts import read_attempts
from titanlite.runs.goodput import goodput_of
from titanlite.runs.lock import RunLock
from titanlite.runs.metrics_jsonl import MetricsLog
from titanlite.runs.read import find_runs, read_run


def listed(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    """What the command prints of runs that it lists without an error."""
    assert main(["runs", *map(str, words)]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    return out


def test_the_table_has_every_run_with_its_state_and_figures(tmp_path, start, capsys):
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
        change_start(tmp_path / "three", 1, pid=2**22 + 1)
        out = listed(capsys, tmp_path)
    lines = {line.split()[0].rpartition("/")[2]: line.split()[1:] for line in out.splitlines()}
    assert lines["one"][:7] == ["done", "40", "of", "40", "5.2500", "5.5000", "220"]
    assert lines["two"][:5] == ["unknown", "20", "5.2500", "5.5000", "220"]
    assert lines["three"][:7] == ["running", "0", "of", "40", "–", "–", "–"]
    assert "died" in listed(capsys, tmp_path / "three"), "its lock is gone, and it has no end"
    write_metrics(tmp_path / "three", [training_row(7, 8.0, 50)])
    attempts = [tmp_path / "three", "--attempts"]
    assert listed(capsys, *attempts).split()[-5:] == ["died", "–", "7", "–", "–"]
    with RunLock(tmp_path / "three"):
        assert listed(capsys, *attempts).split()[-5:] == ["running", "–", "7", "–", "–"]
    record.end("stopped", 7, reason="step 8: loss nan")
    assert listed(capsys, tmp_path).endswith(
        f"note: {tmp_path}/three: stopped by guard: step 8: loss nan\n"
    )


def test_json_has_null_for_what_is_not_known_and_stays_json(tmp_path, start, capsys):
    write_metrics(tmp_path / "one", [training_row(1, 8.0, 50), training_row(20, "nan", 110)])
    start(tmp_path / "one").end("failed", 21, reason="OSError: disk")
    write_metrics(
        tmp_path / "two",
        [training_row(1, 8.0, 50, time=100.0), training_row(2, 7.0, 50, time=103.5)],
    )
    found = json.loads(listed(capsys, tmp_path, "--json"))
    one, two = sorted(found, key=lambda run: run["run"])
    assert one["loss"] == "nan"
    assert (one["state"], one["step"], one["steps"]) == ("failed", 21, 40)
    assert one["tokens_per_second"] == pytest.approx(220)
    assert (one["reason"], one["attempts"], one["validation_loss"]) == ("OSError: disk", 1, None)
    shown = [two[key] for key in ("state", "steps", "started", "duration", "attempts")]
    assert shown == ["unknown", None, 100, 3.5, 0]


def test_time_between_attempts_does_not_count(tmp_path, start):
    start(tmp_path).end("failed", 10)
    start(tmp_path, step=10)
    start(tmp_path, step=10).end("done", 40)
    at = "2026-01-02T03:00:{:02}.000+00:00".format
    change_start(tmp_path, 1, time=at(0), ended=at(30))
    change_start(tmp_path, 2, time=at(40))
    change_start(tmp_path, 3, time=at(50), ended=at(59))
    run = read_run(tmp_path)
    assert run.duration == 39, "nothing is known of the killed attempt"
    times = {11: run.started + 44, 12: run.started + 55}
    write_metrics(tmp_path, [training_row(step, 5.0, time=time) for step, time in times.items()])
    assert read_run(tmp_path).duration == 43, "it lasted at least until its last row"


def test_a_run_begun_anew_in_the_folder_is_not_mixed_with_the_one_before(tmp_path, start):
    start(tmp_path).end("done", 40)
    start(tmp_path).end("failed", 5)
    run = read_run(tmp_path)
    assert (run.state, run.step, len(run.attempts)) == ("failed", 5, 1)


def test_runs_are_found_a_few_levels_deep_and_not_inside_checkpoints(tmp_path):
    for name in ("", "a/b/c", "a/b/c/d/e", "x/checkpoint/step-10", "x/.hidden", "x/step-20"):
        write_metrics(tmp_path / name, [training_row(1, 8.0)])
    (tmp_path / "a" / "circle").symlink_to(tmp_path)
    assert find_runs(tmp_path) == [tmp_path, tmp_path / "a/b/c"]


def test_names_with_control_characters_make_no_line_and_turn_no_text(tmp_path, start, capsys):
    names = ["a\nfake  done  40 of 40", "b\u202eexe.nur", "c\x1b[2J", "d\tx", "e\u2028y", "f\udcff"]
    for name in names:
        write_metrics(tmp_path / name, [training_row(1, 8.0)])
    start(tmp_path / names[0]).end("failed", 2, reason="disk\nnote: all is well\u2066")
    out = listed(capsys, tmp_path) + listed(capsys, tmp_path, "--attempts")
    assert out.replace("\n", "").isprintable()
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


def test_the_share_counts_kept_steps_alone(tmp_path):
    """Step 6 to 10 of the first attempt are trained again by the second one, which is slower."""
    written(
        tmp_path,
        begin(1, 10, 30),
        end(1, 80, 10, "failed"),
        begin(2, 90, 100, step=5),
        end(2, 210, 15),
    )
    rows = [
        training_row(step, 4.0, time=EPOCH + at, seconds_per_step=seconds, data_seconds=0.5)
        for step, at, seconds in ((5, 40, 2.0), (10, 60, 2.0), (10, 130, 3.5), (15, 180, 3.0))
    ]
    write_metrics(tmp_path, rows)
    assert goodput_of(read_run(tmp_path)) == pytest.approx(5 * (1.5 + 3 + 2.5) / 200)


def test_a_folder_without_attempts_or_rows_has_no_share(tmp_path):
    write_metrics(tmp_path, [training_row(5, 4.0, seconds_per_step=2.0)])
    assert goodput_of(read_run(tmp_path)) is None
    written(tmp_path, begin(1, 10, 30), end(1, 80, 0, "failed"))
    (tmp_path / "metrics.jsonl").unlink()
    assert goodput_of(read_run(tmp_path)) == 0


DAMAGES = {
    "deep": b"[" * 100_000 + b"]" * 100_000,
    "no_utf8": b'{"step": "\xff\xfe"}',
    "no_object": b"[1, 2]",
}


def _insert(file: Path, number: int, line: bytes) -> None:
    """Put a line at its number, from 1."""
    lines = file.read_bytes().splitlines(keepends=True)
    file.write_bytes(b"".join([*lines[: number - 1], line + b"\n", *lines[number - 1 :]]))


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("name", [ATTEMPTS, "metrics.jsonl"])
def test_a_damaged_line_is_named_and_the_rest_is_read(tmp_path, start, capsys, name, damage):
    for run in ("bad", "good"):
        write_metrics(tmp_path / run, [training_row(1, 8.0), training_row(2, 6.0)])
        start(tmp_path / run).end("done", 2)
    _insert(tmp_path / "bad" / name, 2, DAMAGES[damage])
    out = listed(capsys, tmp_path)
    lines = {Path(line.split()[0]).name: line.split()[1:] for line in out.splitlines()[1:3]}
    assert lines["bad"][:5] == lines["good"][:5] == ["done", "2", "of", "40", "6.0000"]
    assert out.count("note: ") == 1
    assert f"note: {tmp_path}/bad/{name}:2: no JSON" in out
    found = json.loads(listed(capsys, tmp_path, "--json"))
    assert {Path(run["run"]).name: len(run["problems"]) for run in found} == {"bad": 1, "good": 0}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_run_with_a_damaged_line_resumes(tmp_path, start, caplog, damage):
    write_metrics(tmp_path, [training_row(1, 8.0), training_row(2, 6.0)])
    start(tmp_path)
    _insert(tmp_path / ATTEMPTS, 1, DAMAGES[damage])
    _insert(tmp_path / "metrics.jsonl", 2, DAMAGES[damage])
    assert start(tmp_path, step=1, tokens=1000).lines == [
        "attempt 1 was killed and lost at least 1 step (1,000 tokens), by the last row of its "
        "metrics"
    ]
    metrics = tmp_path / "metrics.jsonl"
    MetricsLog(metrics).truncate_after(1)
    (row,) = metrics.read_bytes().splitlines()
    assert json.loads(row)["step"] == 1
    assert f"{tmp_path}/{ATTEMPTS}:1: no JSON" in caplog.text
    assert "metrics.jsonl:2: no JSON" in caplog.text
    assert [one["attempt"] for one in read_attempts(tmp_path)] == [1, 2]
