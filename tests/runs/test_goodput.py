"""Where the time of a run went, from records that are made up to the second."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from tests.support.run_folders import EPOCH, begin, end, training_row, write_metrics, written
from titanlite.runs.attempts import read_attempts, read_entries
from titanlite.runs.goodput import PARTS, Goodput, goodput_of
from titanlite.runs.lock import RunLock
from titanlite.runs.mtbf import Observed, mean_with, nodes_by, observed
from titanlite.runs.read import read_run
from titanlite.tools.cli import main

HOUR = 3600.0


def parts(folder: Path) -> Goodput:
    found = goodput_of(read_run(folder))
    assert found is not None
    assert list(found.seconds) == list(PARTS)
    assert sum(found.seconds.values()) == pytest.approx(found.wall)
    return found


#: 10 steps: the first takes 12 s, the others 2 s each; a wait of 0.5 s before each.
TEN_STEPS = {"first_step": 12.0, "work": 18.0, "data": 5.0, "save": 3.0, "validate": 4.0}


def test_each_second_of_a_run_without_failures_has_a_part(tmp_path: Path) -> None:
    spent = {**TEN_STEPS, "evaluate": 6.0, "sample": 1.0, "end": 0.5}
    written(tmp_path, begin(1, 10, 30), end(1, 80, 10, trained=10, seconds=spent))
    found = parts(tmp_path)
    assert found.wall == pytest.approx(70)
    assert found.seconds == pytest.approx(
        {
            "start": 20 + 10,
            "steps": 20,
            "data": 5,
            "saves": 3,
            "validation": 4,
            "tasks": 6,
            "other": 1.5,
            "lost": 0,
            "downtime": 0,
            "unknown": 0.5,
        }
    )
    assert found.share == pytest.approx(20 / 70)
    assert (found.trained, found.lost) == (10, 0)


def test_steps_that_a_later_attempt_trains_again_are_lost(tmp_path: Path) -> None:
    """The third attempt goes back beyond the start of the second: all steps of that are lost."""
    unfinished = {**TEN_STEPS, "unfinished": 7.0}
    written(
        tmp_path,
        begin(1, 0, 10),
        end(1, 70, 10, "failed", trained=10, seconds=unfinished),
        begin(2, 80, 90, step=8),
        end(2, 140, 18, "failed", trained=10, seconds=TEN_STEPS),
        begin(3, 200, 210, step=4),
        end(3, 260, 14, trained=10, seconds=TEN_STEPS),
    )
    found = parts(tmp_path)
    assert (found.trained, found.lost) == (30, 6 + 10)
    assert found.seconds["lost"] == pytest.approx(16 * 2.5 + 7)
    assert found.seconds["steps"] == pytest.approx(14 * 2)
    assert found.seconds["downtime"] == pytest.approx(10 + 60)
    assert found.seconds["start"] == pytest.approx(3 * (10 + 10))


def test_steps_that_no_attempt_has_trained_again_yet_are_lost_without_a_save(
    tmp_path: Path,
) -> None:
    stopped = end(1, 70, 10, "failed", trained=10, seconds=TEN_STEPS, lost_steps=3)
    written(tmp_path, begin(1, 0, 10), stopped)
    assert parts(tmp_path).lost == 3


def test_attempts_before_the_first_save_are_of_the_same_run(tmp_path: Path) -> None:
    """Two failed before they saved; the first of all was done, and so is another run."""
    failed = {"trained": 10, "seconds": TEN_STEPS, "saved_step": None}
    earlier = [begin(1, 0, 10), end(1, 70, 10, trained=10, seconds=TEN_STEPS)]
    seconds = {kind: value for kind, value in TEN_STEPS.items() if kind != "save"}
    killed = {"seen": EPOCH + 330, "trained": 10, "seconds": seconds}
    last = end(4, 460, 10, trained=10, seconds=TEN_STEPS)
    written(
        tmp_path,
        *earlier,
        begin(2, 100, 110),
        end(2, 170, 10, "failed", **failed),
        begin(3, 200, 210),
        begin(4, 390, 400, killed=killed),
        last,
    )
    found = parts(tmp_path)
    assert (found.trained, found.lost, found.wall) == (30, 20, 360)
    run = read_run(tmp_path)
    assert (run.started, run.duration, len(run.attempts)) == (EPOCH + 110, 60 + 120 + 60, 3)
    assert observed(read_run(tmp_path), nodes_by(8)).failures == 2
    changed = {"optimizer.lr": "1 -> 2"}
    written(tmp_path, *earlier, begin(2, 100, 110), begin(3, 390, 400, config_changes=changed))
    assert parts(tmp_path).wall == 10, "another config is another run"
    saved = {"killed": {**killed, "seconds": TEN_STEPS}}
    written(tmp_path, *earlier, begin(2, 100, 110), begin(3, 390, 400, **saved), end(3, 460, 10))
    assert read_run(tmp_path).started == EPOCH + 400, "its checkpoints were taken away"


def test_steps_that_the_guard_has_rolled_back_are_lost(tmp_path: Path) -> None:
    """15 steps were trained, and 10 stand."""
    spent = {"first_step": 2.0, "work": 28.0, "rollback": 1.0}
    written(tmp_path, begin(1, 0, 10), end(1, 60, 10, trained=15, seconds=spent))
    found = parts(tmp_path)
    shown = found.seconds["lost"], found.seconds["steps"], found.seconds["other"]
    assert (found.lost, shown) == (5, pytest.approx((10, 20, 1)))


def rows(first: int, last: int, began: float, **more: Any) -> list[dict[str, Any]]:
    """Rows of every second step: 2 s each with a wait of 0.5 s; the first takes 12 s."""
    found = []
    for step in range(first, last + 1):
        seconds = 12.0 if step == first else 2.0
        if step == first or step % 2 == 0:
            time = began + 12 + 2 * (step - first)
            row = training_row(step, 5.0, time=time, data_seconds=0.5)
            found.append({**row, "seconds_per_step": seconds})
    return [*found, {**found[-1], "step": last, **more}] if more else found


def test_of_a_killed_attempt_its_rows_tell_until_the_next_start_keeps_what_they_told(
    tmp_path: Path,
) -> None:
    written(tmp_path, begin(1, 0, 10))
    assert read_attempts(tmp_path)[0]["started"] == EPOCH + 10
    write_metrics(tmp_path, rows(1, 10, EPOCH + 10))
    alone = parts(tmp_path)
    assert (alone.trained, alone.lost, alone.wall) == (10, 0, pytest.approx(40))
    assert alone.seconds["steps"] == pytest.approx(10 * 1.5)
    assert alone.seconds["data"] == pytest.approx(5)
    assert alone.seconds["start"] == pytest.approx(10 + 10)
    killed = {"seen": EPOCH + 40, "trained": 10, "seconds": {"first_step": 11.5, "work": 13.5}}
    killed["seconds"] |= {"data": 5.0, "save": 0.25}
    written(tmp_path, begin(1, 0, 10), begin(2, 100, 110, step=6, killed=killed))
    write_metrics(tmp_path, [])
    both = parts(tmp_path)
    assert (both.trained, both.lost) == (10, 4)
    assert both.seconds["lost"] == pytest.approx(4 * 2)
    assert both.seconds["saves"] == pytest.approx(0.25)
    assert both.seconds["downtime"] == pytest.approx(60), "from its last row to the launch"


def test_the_next_start_keeps_the_times_of_a_killed_attempt(tmp_path: Path, start: Any) -> None:
    start(tmp_path)
    began = read_attempts(tmp_path)[0]["started"]
    told = rows(1, 10, began, save_seconds=0.75)
    told.append({"step": 10, "time": began + 33.0, "validation_seconds": 2.0})
    write_metrics(tmp_path, told)
    start(tmp_path, step=6, tokens=6000)
    (_, second) = read_entries(tmp_path)
    assert second["lost"] == {"attempt": 1, "steps": 4, "tokens": 4000}
    assert second["killed"] == {
        "seen": pytest.approx(began + 33),
        "trained": 10,
        "seconds": {
            "first_step": 11.5,
            "work": 13.5,
            "data": 5.0,
            "save": 0.75,
            "validate": 2.0,
        },
    }


def test_a_start_that_waited_for_the_end_of_the_one_before_overlaps_nothing(tmp_path: Path) -> None:
    written(
        tmp_path,
        begin(1, 0, 10),
        end(1, 70, 10, "preempted", trained=10, seconds=TEN_STEPS),
        begin(2, 50, 75, step=10),
        end(2, 125, 20, trained=10, seconds=TEN_STEPS),
    )
    found = parts(tmp_path)
    assert (found.wall, found.seconds["downtime"]) == (125, 0)
    assert found.seconds["start"] == pytest.approx(10 + 5 + 20)


def test_a_record_of_an_older_version_has_what_its_rows_tell(tmp_path: Path) -> None:
    written(tmp_path, begin(1, None, 10), end(1, 60, 10))
    write_metrics(tmp_path, rows(1, 10, EPOCH + 10))
    found = parts(tmp_path)
    assert (found.wall, found.trained) == (50, 10)
    assert found.seconds["steps"] == pytest.approx(15)
    assert found.seconds["unknown"] == pytest.approx(20)
    assert goodput_of(read_run(write_metrics(tmp_path / "other", []))) is None


def test_a_live_run_lasts_until_its_last_sign_of_life(tmp_path: Path, start: Any) -> None:
    with RunLock(tmp_path):
        start(tmp_path)
        began = read_attempts(tmp_path)[0]["started"]
        write_metrics(tmp_path, rows(1, 10, began))
        found = parts(tmp_path)
        assert (found.trained, found.lost) == (10, 0)
        assert found.seconds["unknown"] == pytest.approx(0, abs=0.1)
        assert observed(read_run(tmp_path), nodes_by(8)).failures == 0


@pytest.mark.parametrize(
    "wrong",
    [
        {"killed": {"seen": "now", "trained": 1, "seconds": {}}},
        {"killed": {"seen": None, "trained": -1, "seconds": {}}},
        {"killed": {"seen": None, "trained": 1, "seconds": {"work": True}}},
        {"killed": {"trained": 1}},
        {"killed": []},
        {"seconds": {"work": -1.0}},
        {"seconds": {"work": "nan"}},
        {"saves": {"count": 1e400}},
        {"trained": 0.5},
        {"launched": "now"},
    ],
)
def test_a_line_with_wrong_times_is_named_and_passed_over(
    tmp_path: Path, wrong: dict[str, Any]
) -> None:
    written(tmp_path, begin(1, 0, 10), {**begin(2, 50, 60), **wrong})
    run = read_run(tmp_path)
    assert len(run.attempts) == 1
    assert "attempts.jsonl: a line whose " in run.problems[0]
    assert parts(tmp_path).wall == 10


# Mean time between failures


def folder_of(tmp_path: Path, ends: list[str | None], **more: Any) -> Path:
    """A run of 16 ranks whose attempts take 10 minutes each, with 2 minutes between them."""
    entries = []
    for place, state in enumerate(ends):
        began = 720 * place
        killed = {"seen": EPOCH + began - 120, "trained": 5, "seconds": {"first_step": 30.0}}
        before = {"killed": killed} if place and ends[place - 1] is None else {}
        step = 5 * place
        entries.append(begin(place + 1, began, began + 60, step, **before, **more))
        if state:
            spent = {"first_step": 30.0, "work": 100.0, "save": 6.0}
            saves = {"count": 2, "milliseconds": 20_000}
            code = {"exit_code": 2} if state == "config" else {}
            state = "failed" if state == "config" else state
            times = {"trained": 5, "seconds": spent, "saves": saves}
            entries.append(end(place + 1, began + 600, step + 5, state, **times, **code))
    return written(tmp_path, *entries)


def seen_in(folder: Path) -> Observed:
    return observed(read_run(folder), nodes_by(8))


def test_killed_and_failed_attempts_are_failures_and_stops_are_none(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, ["failed", None, "preempted", "config", "done"])
    found = seen_in(folder)
    assert found.failures == 2
    assert found.node_seconds == pytest.approx(5 * 600 * 2), "2 nodes of 8 GPUs"
    assert found.mtbf == pytest.approx(3000)
    assert found.restart == pytest.approx(120 + 60 + 30)
    assert (found.save_visible, found.save_seconds) == (3, 10)


def test_the_launcher_tells_how_many_ranks_a_node_has(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, ["failed", "done"], environment={"LOCAL_WORLD_SIZE": "4"})
    assert seen_in(folder).node_seconds == pytest.approx(2 * 600 * 4)


#: Failures → the limits of their mean, 95 % sure, as Garwood (1936) and later tables have them.
GARWOOD = {1: (0.0253, 5.572), 5: (1.623, 11.668), 10: (4.795, 18.390), 100: (81.36, 121.63)}


@pytest.mark.parametrize("failures", GARWOOD)
def test_the_uncertainty_is_garwoods(failures: int) -> None:
    few, many = GARWOOD[failures]
    found = Observed(failures, 1000 * HOUR, None, None, None)
    assert 1000 * HOUR / found.most == pytest.approx(few, rel=1e-3)
    assert 1000 * HOUR / found.least == pytest.approx(many, rel=1e-4)
    assert found.mtbf == 1000 * HOUR / failures


def test_without_a_failure_there_is_a_lower_limit(tmp_path: Path) -> None:
    found = Observed(0, 300 * HOUR, None, None, None)
    assert (found.mtbf, found.most) == (None, math.inf)
    assert found.least == pytest.approx(300 * HOUR / -math.log(0.05))
    assert mean_with(0, 0.5) == pytest.approx(math.log(2))


def test_the_command_shows_the_parts_and_the_failures(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = folder_of(tmp_path / "one", ["failed", "done"])
    write_metrics(tmp_path / "two", [training_row(1, 8.0)])
    assert main(["runs", str(tmp_path), "--goodput"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["run", "time", "goodput", *(p for p in PARTS if p != "steps")]
    cells = next(line.split() for line in lines if "/one " in line)
    shares = [float(cell[:-1]) for cell in cells[2:]]
    assert cells[1] == "0:22:00"
    assert sum(shares) == pytest.approx(100, abs=0.5)
    assert next(line.split()[1:] for line in lines if "/two " in line) == ["–"] * 11
    assert (
        "1 failure in 0.667 node hours: one in 0.667 hours of a node (95% sure: 0.12 to"
        in (lines[-1])
    )
    assert main(["runs", str(folder), "--json"]) == 0
    (found,) = json.loads(capsys.readouterr().out)
    assert found["goodput"]["share"] == pytest.approx(shares[0] / 100, abs=1e-3)
    assert found["goodput"]["mtbf"]["failures"] == 1
    assert found["goodput"]["mtbf"]["hours"] == pytest.approx(2400 / HOUR)
