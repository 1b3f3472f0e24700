"""`titanlite runs`."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.runs.conftest import training_row, write_metrics
from titanlite.runs.attempts import seconds
from titanlite.runs.folder import RunRecord
from titanlite.runs.read import find_runs, read_run
from titanlite.tools.cli import main

Start = Callable[..., RunRecord]


def listed(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    status = main(["runs", *words])
    out, err = capsys.readouterr()
    return status, out, err


def test_the_table_has_every_run_with_its_state_and_figures(
    tmp_path: Path, start: Start, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [training_row(1, 8.0, 50), training_row(20, 5.25, 110), {"step": 20, "time": 1.0, "validation_loss": 5.5}]
    write_metrics(tmp_path / "a" / "one", rows)
    start(tmp_path / "a" / "one").finish("done", 40)
    write_metrics(tmp_path / "two", rows)
    record = start(tmp_path / "three")
    status, out, err = listed(capsys, str(tmp_path))
    assert (status, err) == (0, "")
    lines = {line.split()[0].rpartition("/")[2]: line.split()[1:] for line in out.splitlines()}
    assert lines["one"][:7] == ["done", "40", "of", "40", "5.2500", "5.5000", "220"]
    assert lines["two"][:5] == ["unknown", "20", "5.2500", "5.5000", "220"]
    assert lines["three"][:7] == ["running", "0", "of", "40", "–", "–", "–"]
    record.finish("stopped", 7, "step 8: loss nan")
    out = listed(capsys, str(tmp_path))[1]
    assert "three  stopped by guard   7 of 40" in out
    assert out.endswith(f"note: {tmp_path}/three: stopped by guard: step 8: loss nan\n")


def test_json_has_null_for_what_is_not_known_and_stays_json(
    tmp_path: Path, start: Start, capsys: pytest.CaptureFixture[str]
) -> None:
    write_metrics(tmp_path / "one", [training_row(1, 8.0, 50), training_row(20, "nan", 110)])
    start(tmp_path / "one").finish("failed", 21, "OSError: disk")
    write_metrics(tmp_path / "two", [training_row(1, 8.0, 50, time=100.0), training_row(2, 7.0, 50, time=103.5)])
    found = json.loads(listed(capsys, str(tmp_path), "--json")[1])
    one, two = sorted(found, key=lambda run: run["run"])
    assert one["loss"] == "nan" and (one["state"], one["step"], one["steps"]) == ("failed", 21, 40)
    assert (one["tokens_per_second"], one["tokens_per_second_per_device"]) == (pytest.approx(220), 110)
    assert (one["reason"], one["attempts"], one["validation_loss"]) == ("OSError: disk", 1, None)
    assert (two["state"], two["steps"], two["started"], two["duration"], two["attempts"]) == (
        "unknown",
        None,
        100,
        3.5,
        0,
    )


def test_newest_first_and_time_between_attempts_does_not_count(tmp_path: Path, start: Start) -> None:
    start(tmp_path).finish("failed", 10)
    start(tmp_path, first_step=10).finish("done", 40)
    record = json.loads((tmp_path / "run.json").read_text())
    for attempt, (began, ended) in zip(record["attempts"], ((0, 30), (50, 59)), strict=True):
        attempt["started"], attempt["ended"] = (f"2026-01-02T03:00:{s:02}.000+00:00" for s in (began, ended))
    (tmp_path / "run.json").write_text(json.dumps(record))
    assert read_run(tmp_path).duration == 39
    began = record["attempts"][1]["heartbeat"] = record["attempts"][1].pop("ended")
    (tmp_path / "run.json").write_text(json.dumps(record))
    newest = seconds(began)
    assert newest is not None
    write_metrics(tmp_path, [training_row(11, 5.0, time=newest + 4)])
    assert read_run(tmp_path).duration == 43


def test_runs_are_found_a_few_levels_deep_and_not_inside_checkpoints(tmp_path: Path) -> None:
    for name in ("", "a/b/c", "a/b/c/d/e", "x/checkpoint/step-10", "x/.hidden", "x/step-20"):
        write_metrics(tmp_path / name, [training_row(1, 8.0)])
    (tmp_path / "a" / "circle").symlink_to(tmp_path)
    assert find_runs(tmp_path) == [tmp_path, tmp_path / "a/b/c"]


def test_what_cannot_be_read_is_named_and_hides_nothing_else(
    tmp_path: Path, start: Start, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_metrics(tmp_path / "torn", [training_row(1, 8.0), training_row(2, 7.0), training_row(3, 6.0)])
    text = (folder / "metrics.jsonl").read_text().splitlines()
    (folder / "metrics.jsonl").write_text("\n".join([text[0], "{{{", text[2]]) + "\n")
    start(folder).finish("done", 40)
    write_metrics(tmp_path / "odd", [training_row(1, "much")])
    write_metrics(tmp_path / "good", [training_row(1, 6.5)])
    (write_metrics(tmp_path / "record", [training_row(1, 8.0)]) / "run.json").write_text("[]")
    status, out, _ = listed(capsys, str(tmp_path))
    assert status == 0
    assert f"note: {folder}/metrics.jsonl:2: not a JSON object; delete the line to read the others" in out
    assert "metrics.jsonl: row of step 1: loss is 'much', not a number; mend or delete the row" in out
    assert f"note: {tmp_path}/record/run.json: not a record of a run" in out
    assert "6.5000" in out and "done     40 of 40" in out


def test_a_missing_or_empty_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert listed(capsys) == (
        2,
        "",
        "error: outputs: there is no such folder; runs are written to job.dump_folder, name it or a folder above it\n",
    )
    (tmp_path / "outputs").mkdir()
    assert listed(capsys) == (0, "no runs below outputs\n", "")
    assert listed(capsys, "--json")[1] == "[]\n"


def test_config_keys_are_refused_not_ignored(capsys: pytest.CaptureFixture[str]) -> None:
    assert listed(capsys, "--training.steps", "5") == (
        2,
        "",
        "error: --training.steps is a config key; this command reads what runs have written and takes none\n",
    )
