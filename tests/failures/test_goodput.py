"""The goodput of real runs that are killed, against a stop-watch beside the loop."""

from __future__ import annotations

import json
import time
from collections import defaultdict
from pathlib import Path
from statistics import median

import pytest

from tests.support.stopwatch import FIRST_STEP
from tests.support.train_runs import STEPS, flags
from titanlite import exit_codes
from titanlite.runs.goodput import goodput_of
from titanlite.runs.mtbf import nodes_by, observed
from titanlite.runs.read import read_run
from titanlite.tools.drill.faults import NO_FAULT, Fault
from titanlite.tools.drill.ranks import train
from titanlite.utils import read_lines

#: Seconds between two attempts.
PAUSE = 0.8
MORE = ["--validation.enable", "--validation.freq=4", "--validation.steps=1"]


def watched(folder: Path) -> dict[str, float]:
    """Seconds by what was done. Of steps the last time of each is kept, earlier ones are "lost".

    The first step of an attempt counts as much as the median of the others.
    """
    seconds: dict[str, float] = defaultdict(float)
    kept: dict[int, float] = {}
    rows = read_lines(folder / "watch.jsonl")
    waited = 0.0
    is_first = True
    usual = median(row["seconds"] for row in rows if row["what"] == "step")
    for row in rows:
        if row["what"] == "start":
            is_first = True
        elif row["what"] == "data":
            # A step that is killed has its wait in what is unfinished.
            waited = row["seconds"]
        elif row["what"] == "step":
            seconds["data"] += waited
            seconds["lost"] += kept.get(row["step"], 0.0)
            kept[row["step"]] = usual if is_first else row["seconds"]
            is_first = False
        else:
            seconds[row["what"]] += row["seconds"]
    seconds["steps"] = sum(kept.values())
    return seconds


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["disabled", "async"])
def test_the_parts_of_a_run_with_kills_are_those_of_a_stop_watch(tmp_path: Path, mode: str) -> None:
    """Rank 1 is killed, then rank 0, then the run is asked to stop, then it ends."""
    faults = [
        Fault("kill", "step", 4, rank=1),
        Fault("kill", "step", 6, rank=0),
        Fault("term", "step", 7),
        NO_FAULT,
    ]
    arguments = flags(tmp_path, *MORE, f"--checkpoint.async_mode={mode}")
    for place, fault in enumerate(faults):
        if place:
            time.sleep(PAUSE)
        main = "tests.support.stopwatch"
        codes, text = train(arguments, 2, tmp_path / "console", fault, main)
    assert codes == [exit_codes.DONE] * 2, text
    wall = time.time() - read_lines(tmp_path / "watch.jsonl")[0]["time"]
    run = read_run(tmp_path)
    found = goodput_of(run)
    assert found is not None
    seconds = found.seconds
    assert sum(seconds.values()) == pytest.approx(found.wall)
    assert found.wall == pytest.approx(wall, abs=2), "to the record of the end, not of its process"
    assert seconds["unknown"] == pytest.approx(0, abs=0.1 * len(faults))

    told = watched(tmp_path)
    assert found.trained - found.lost == STEPS
    again = seconds["lost"] - _unfinished(tmp_path)
    assert told["lost"] > 0
    assert seconds["steps"] == pytest.approx(told["steps"], rel=0.1, abs=0.1)
    assert seconds["data"] == pytest.approx(told["data"] * STEPS / found.trained, rel=0.1, abs=0.1)
    trained = seconds["steps"] + seconds["data"] + again
    assert trained == pytest.approx(told["steps"] + told["data"] + told["lost"], rel=0.1, abs=0.1)
    assert seconds["start"] > len(faults) * FIRST_STEP
    assert seconds["saves"] == pytest.approx(told["save"], rel=0.1, abs=0.3)
    assert seconds["validation"] == pytest.approx(told["validation"], rel=0.1, abs=0.15)
    assert seconds["downtime"] > PAUSE * (len(faults) - 1)
    assert found.share == pytest.approx(seconds["steps"] / found.wall)
    seen = observed(run, nodes_by(8))
    assert seen.failures == 2
    assert seen.node_seconds == pytest.approx(found.wall - seconds["downtime"])
    assert seen.restart is not None
    assert seen.restart > PAUSE


def _unfinished(folder: Path) -> float:
    """Seconds of steps that were never done: their failure was noticed in them."""
    entries = [json.loads(line) for line in (folder / "attempts.jsonl").read_text().splitlines()]
    return sum(entry.get("seconds", {}).get("unfinished", 0.0) for entry in entries)
