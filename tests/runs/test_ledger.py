"""attempts.jsonl: what began, what changed, what was lost."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.runs.conftest import training_row, write_metrics
from tests.words import listening
from titanlite.prepare import checked_plans
from titanlite.runs.ledger import FILE, Ledger, begin, look_back, read_entries
from titanlite.tools.cli import main


def _begin(folder: Path, *flags: str, step: int = 0, tokens: int = 0) -> tuple[Ledger, list[str]]:
    """Start an attempt as the trainer does: the ledger first, then the config of this attempt."""
    argv = [f"--job.dump_folder={folder}", "--training.steps=40", *flags]
    plans = checked_plans(argv, 2, training=False)[1]
    found = begin(
        folder,
        look_back(folder),
        plans,
        world_size=2,
        device="CPU (made up)",
        step=step,
        tokens=tokens,
        resumed=step > 0,
    )
    (folder / "config.toml").write_text(plans.config_toml)
    return found


def _last(folder: Path) -> dict[str, Any]:
    return read_entries(folder)[-1]


def test_starts_and_ends_with_what_changed_between_them(tmp_path: Path) -> None:
    ledger, lines = _begin(tmp_path, "--optimizer.lr=0.001")
    assert lines == []
    start = _last(tmp_path)
    assert (start["event"], start["attempt"], start["began"], start["after"]) == ("start", 1, "fresh", None)
    assert (start["step"], start["config_changes"], start["ranks"]) == (0, {}, 2)
    assert {"titanlite", "python", "torch"} <= start["versions"].keys() and start["host"] and start["pid"]
    ledger.saved(20, 20_000)
    ledger.end("preempted", 25, 25_000, 6, "SIGTERM on every rank")
    ledger.end("failed", 26, 26_000, 1, "a later word")
    end = _last(tmp_path)
    assert end.pop("time") >= start["time"]
    assert end == {
        "event": "end",
        "attempt": 1,
        "state": "preempted",
        "exit_code": 6,
        "reason": "SIGTERM on every rank",
        "step": 25,
        "saved_step": 20,
        "lost_steps": 5,
        "lost_tokens": 5_000,
    }
    _, lines = _begin(tmp_path, "--optimizer.lr=0.002", "--model.overrides.n_layers=4", step=20, tokens=20_000)
    start = _last(tmp_path)
    assert (start["attempt"], start["began"], start["after"]) == (2, "resumed from step 20", "preempted")
    assert start["config_changes"] == {"optimizer.lr": "0.001 -> 0.002", "model.overrides.n_layers": "(not set) -> 4"}
    assert "lost" not in start
    assert lines == [
        "config changed since attempt 1: model.overrides.n_layers: (not set) -> 4",
        "config changed since attempt 1: optimizer.lr: 0.001 -> 0.002",
    ] or lines == [
        "config changed since attempt 1: optimizer.lr: 0.001 -> 0.002",
        "config changed since attempt 1: model.overrides.n_layers: (not set) -> 4",
    ]


def test_a_killed_attempt_has_no_end_and_the_next_start_says_what_was_lost(tmp_path: Path) -> None:
    _begin(tmp_path)
    write_metrics(tmp_path, [training_row(1, 8.0), training_row(31, 7.0), {"step": 31, "validation_loss": 7.1}])
    _, lines = _begin(tmp_path, step=20, tokens=20_000)
    start = _last(tmp_path)
    assert start["after"] == "killed" and start["lost"] == {"attempt": 1, "steps": 11, "tokens": 11_000}
    assert lines == ["attempt 1 was killed and lost at least 11 steps (11,000 tokens), by the last row of its metrics"]


def test_an_attempt_that_resumed_and_saved_nothing_loses_only_its_own(tmp_path: Path) -> None:
    ledger, _ = _begin(tmp_path, step=20, tokens=20_000)
    ledger.end("failed", 23, 23_000, 7, "RuntimeError")
    end = _last(tmp_path)
    assert (end["saved_step"], end["lost_steps"], end["lost_tokens"]) == (20, 3, 3_000)


def test_a_finished_run_without_checkpoints_lost_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ledger, _ = _begin(tmp_path)
    write_metrics(tmp_path, [training_row(30, 7.0)])
    ledger.end("done", 30, 30_720, 0)
    assert (_last(tmp_path)["lost_steps"], _last(tmp_path)["lost_tokens"]) == (0, 0)
    text = (tmp_path / FILE).read_text()
    for recorded in (text, text.replace('"lost_tokens": 0', '"lost_tokens": 30720')):  # the second as it once was
        (tmp_path / FILE).write_text(recorded)
        assert main(["runs", str(tmp_path), "--attempts"]) == 0
        assert capsys.readouterr().out.splitlines()[2].split()[-3:] == ["30", "–", "0"]


def test_a_torn_line_costs_only_itself(tmp_path: Path) -> None:
    _begin(tmp_path)[0].end("done", 40, 40_000, 0)
    with open(tmp_path / FILE, "a") as file:
        file.write('{"event": "sta')
    _begin(tmp_path, step=40, tokens=40_000)
    assert [(e["event"], e["attempt"]) for e in read_entries(tmp_path)] == [("start", 1), ("end", 1), ("start", 2)]
    assert _last(tmp_path)["after"] == "done"
    assert len((tmp_path / FILE).read_text().splitlines()) == 4


def test_a_ledger_that_cannot_be_written_is_one_warning(tmp_path: Path) -> None:
    (tmp_path / FILE).mkdir()
    with listening() as messages:
        ledger, _ = _begin(tmp_path)
        ledger.saved(1, 1)
        ledger.end("done", 40, 40_000, 0)
    assert len(messages) == 1 and f"cannot write {tmp_path / FILE}" in messages[0]


def test_a_folder_that_is_not_there_yet_is_made(tmp_path: Path) -> None:
    Ledger(tmp_path / "a" / "b" / FILE, 1, 0, 0, resumed=False).end("done", 40, 40_000, 0)
    assert _last(tmp_path / "a" / "b")["state"] == "done"


def test_secrets_of_the_environment_are_not_in_it(tmp_path: Path) -> None:
    _begin(tmp_path, "--launch.environment.HF_TOKEN=s3cret-1")
    _begin(tmp_path, "--launch.environment.HF_TOKEN=s3cret-2")
    assert "s3cret-2" not in (tmp_path / FILE).read_text()


def test_the_command_shows_attempts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ledger, _ = _begin(tmp_path)
    ledger.saved(20, 20_000)
    ledger.end("preempted", 20, 20_000, 5, "SIGTERM on every rank")
    _begin(tmp_path, "--optimizer.lr=0.5", step=20, tokens=20_000)
    write_metrics(tmp_path, [training_row(20, 8.0), training_row(29, 7.0)])
    _begin(tmp_path, "--optimizer.lr=0.5", step=20, tokens=20_000)
    assert main(["runs", str(tmp_path), "--attempts"]) == 0
    out = capsys.readouterr().out
    cells = [line.split() for line in out.splitlines()]
    assert cells[2][0] == "1" and cells[2][-5:] == ["preempted", "5", "20", "20", "0"]
    assert cells[3][0] == "2" and cells[3][-6:] == ["no", "end", "–", "–", "–", "9,000"]
    assert "note: attempt 1: SIGTERM on every rank" in out
    assert "note: attempt 2: optimizer.lr: 0.0008 -> 0.5" in out
    assert main(["runs", str(tmp_path), "--attempts", "--json"]) == 0
    entries = json.loads(capsys.readouterr().out)[str(tmp_path)]
    assert [entry["event"] for entry in entries] == ["start", "end", "start", "start"]
