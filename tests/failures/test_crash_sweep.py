"""Killed at each event of a save: the next start resumes the newest published step, and the end is
the same.
"""

from __future__ import annotations

import json
import re
import signal
from pathlib import Path

import pytest

from tests.support.faults import PUBLISHED, Fault
from tests.support.processes import python
from tests.support.train_runs import (
    INTERVAL,
    STEPS,
    batches,
    finish,
    flags,
    rows,
    train,
    unequal,
)
from titanlite import exit_codes
from titanlite.runs.attempts import read_entries

STRUCK = 4


def saved_steps(run: Path) -> list[int]:
    """Return the steps of the checkpoints of a run that are published."""
    return [int(path.parent.name[5:]) for path in run.glob("checkpoint/step-?/manifest.json")]


CASES = [
    (1, "disabled", "folder made", 0),
    (1, "disabled", "shard half", 0),
    (1, "disabled", "index half", 0),
    (1, "disabled", "published", 0),
    (1, "disabled", "prune half way", 0),
    (1, "async", "publish", 0),
    (2, "disabled", "publish", 0),
    (2, "async", "shard half", 1),
]


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "mode", "event", "rank"), CASES)
def test_killed_in_a_save(tmp_path, straight, ranks, mode, event, rank):
    arguments = flags(tmp_path, "--checkpoint.keep_latest_k=1", f"--checkpoint.async_mode={mode}")
    codes, text = train(arguments, ranks, tmp_path / "killed", Fault("kill", event, STRUCK, rank))
    assert codes[rank] == -signal.SIGKILL, text
    assert all(code in (-signal.SIGKILL, exit_codes.LOST_PEER) for code in codes), text
    newest = max(saved_steps(tmp_path))
    if event.startswith("prune"):
        assert newest >= STRUCK, (
            "an old one goes when a new one is known to be good, which may be a save later"
        )
    else:
        assert newest == (STRUCK if event in PUBLISHED else STRUCK - INTERVAL)

    text = finish(arguments, ranks, tmp_path / "resumed")
    assert re.findall(r"resumed from step (\d+)", text) == [str(newest)]
    assert "passed over" not in text, "a save that was not finished is no checkpoint"
    other = straight(ranks)
    assert rows(tmp_path) == rows(other), "each step once, with the numbers of the undisturbed run"
    assert batches(tmp_path, ranks) == batches(other, ranks), "no sequence left out, none twice"
    assert unequal(tmp_path, other) == []
    *_, before, start, end = read_entries(tmp_path)
    assert (start["event"], start["step"], end["state"]) == ("start", newest, "done")
    # Rank 0 wrote an end, when it was another one that was killed.
    lost = start["lost"]["steps"] if "lost" in start else before["lost_steps"]
    assert lost <= (2 if mode == "async" else 1) * INTERVAL
    assert STEPS in saved_steps(tmp_path)
    left = {path.name for path in (tmp_path / "checkpoint").iterdir()}
    assert left == {f"step-{step}" for step in saved_steps(tmp_path)}, (
        "what the kill left is deleted"
    )


@pytest.mark.soak
def test_runs_that_are_killed_end_as_if_they_were_not(tmp_path):
    """Copies in the background too, an object store, and local saves with copies; foreground and
    background are the crash sweep's.
    """
    kinds = ["pinned", "store", "copied"]
    words = ["--kinds", *kinds, "--kills=6", "--steps=24", "--interval=4", "--seed=3"]
    done = python("benchmarks/crash_soak.py", *words, f"--out={tmp_path / 'soak'}", timeout=1800)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Nothing was lost, nothing came twice." in done.stdout
    tallies = json.loads((tmp_path / "soak.json").read_text())["tallies"]
    assert [tally["kind"] for tally in tallies] == kinds
    for tally in tallies:
        assert tally["kills"] == 2
        assert tally["runs_finished"] >= 1
        assert tally["starts"] >= 3
        assert tally["corruptions_found"] == tally["corruptions"]
        assert tally["data_lost"] == tally["tensors_unequal"] == 0
