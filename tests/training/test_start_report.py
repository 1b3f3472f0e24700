"""The rows of the startup report, and those of a real run."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

from tests.support.golden_run import GoldenRun
from titanlite.assembly import start_report as opening
from titanlite.assembly.schedule_change import schedule_change
from titanlite.checkpoint.loaded import LoadedState
from titanlite.config.sections import (
    Checkpoint,
)
from titanlite.optim.schedule import LearningRate, Schedule


def test_phases_count_as_a_part_of_the_schedule() -> None:
    plain = LearningRate(Schedule(10, 2, "constant", "titan", 0.0), 1e-3)
    halved = replace(plain, phases=((8, 0.5),))

    def change(before: LearningRate, now: LearningRate) -> str | None:
        state = json.loads(json.dumps({"schedule": before.record()}))
        return schedule_change(LoadedState(6, state), now, 10)

    assert change(plain, plain) is None
    assert change(halved, halved) is None
    assert "phases [[8, 0.5]] -> []" in (change(halved, plain) or "")
    assert "phases [] -> [[8, 0.5]]" in (change(plain, halved) or "")


def test_schedules_of_another_version_are_told_without_their_rates() -> None:
    now = LearningRate(Schedule(10, 2, "constant", "titan", 0.0), 1e-3)
    for name, value in {"decay_type": "wavelet", "warmup_steps": "2 %", "phases": [8]}.items():
        state = {"schedule": {**now.record(), name: value}}
        found = schedule_change(LoadedState(6, state), now, 10)
        assert found is not None
        assert f"schedule changed since step 6: {name} {value} -> " in found
        assert "learning rate of step" not in found


def test_the_use_of_an_initial_load_path_is_told() -> None:
    section = Checkpoint(enable_checkpoint=True, folder="b", initial_load_path="a")
    assert opening.began(section, LoadedState(0, {}, folder=Path("a/step-4"), origin="from")) == (
        "a run that starts from a/step-4 with its weights (checkpoint.initial_load_path; b has no "
        "checkpoint yet)"
    )
    resumed = opening.began(section, LoadedState(2, {}, folder=Path("b/step-2")))
    assert resumed.startswith("resumed from step 2 in b (")
    assert "so checkpoint.initial_load_path is not used" in resumed


def test_a_run_reports_everything_once(golden: GoldenRun) -> None:
    said, _ = golden.console()
    names = ["versions", "model", "tokenizer", "compute", "devices", "mesh"]
    names += ["data", "global batch", "length", "optimizer", "schedule"]
    column = len("global batch") + 2
    rows = [line for line in said if line[:column].strip() in names and line[column - 1] == " "]
    assert [row[:column].strip() for row in rows] == names
    assert not any(line.startswith(("activations ", "memory ")) for line in said), "of GPUs alone"
    assert not any(line.startswith("note: tokens per step") for line in said)
    assert not re.search(r"(?<![\d.,])1 [a-z-]+(?<!s)s\b", "\n".join(rows))
