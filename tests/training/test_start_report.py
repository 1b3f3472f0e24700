"""The rows of the startup report, and those of a real run."""

from __future__ import annotations

import re
from pathlib import Path

from tests.support.golden_run import GoldenRun
from titanlite.assembly import start_report as opening
from titanlite.checkpoint.loaded import LoadedState
from titanlite.config.sections import (
    Checkpoint,
)


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
