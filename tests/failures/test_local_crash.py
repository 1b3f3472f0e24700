"""Killed at each event of a local save, or of a shared one beside local ones: at most the local
interval is lost, and the end is the same.
"""

from __future__ import annotations

import re
import shutil
import signal
from pathlib import Path

import pytest

from tests.support.faults import PUBLISHED, Fault
from tests.support.train_runs import batches, finish, flags, rows, train, unequal

RANKS = 2
SHARED = 4
#: The new local save is there at these events of the rank that is killed.
DONE = ("local published", "local prune")


def _kill(folder: Path, fault: Fault, *more: str) -> list[str]:
    """Train until a rank is killed; return the arguments."""
    arguments = flags(
        folder / "run",
        f"--checkpoint.interval={SHARED}",
        f"--checkpoint.local_folder={folder}/node-{{local_rank}}",
        "--checkpoint.local_interval=1",
        "--checkpoint.local_copies=1",
        *more,
    )
    codes, text = train(arguments, RANKS, folder / "killed", fault)
    assert codes[fault.rank] == -signal.SIGKILL, text
    return arguments


def _resume(folder: Path, arguments: list[str], other: Path) -> tuple[int, str]:
    """Train to the end, which is that of a run without a fault and without local saves.

    Returns the step that it resumed from, and its output.
    """
    text = finish(arguments, RANKS, folder / "resumed")
    run = folder / "run"
    assert rows(run) == rows(other), "each step once, with the numbers of the run without a fault"
    assert batches(run, RANKS) == batches(other, RANKS), "no sequence left out, none twice"
    assert unequal(run, other) == []
    (step,) = re.findall(r"resumed from step (\d+)", text)
    return int(step), text


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mode", "event", "rank"),
    [
        ("disabled", "local part half", 1),
        ("disabled", "local published", 0),
        ("async", "local publish", 1),
        ("async", "local prune", 0),
    ],
)
def test_killed_in_a_local_save(tmp_path, straight, mode, event, rank):
    # The next save waits for this one. Step 8 has a shared save, which does not.
    struck = 6
    fault = Fault("kill", event, struck, rank)
    arguments = _kill(tmp_path, fault, f"--checkpoint.async_mode={mode}")
    step, text = _resume(tmp_path, arguments, straight(RANKS))
    if event in DONE:
        assert step == struck
    else:
        # The other rank may have published: then all parts are there.
        assert step in (struck - 1, struck)
    assert f"the local save of step {step} is taken" in text
    left = {path.name for path in tmp_path.glob("node-*/run-*/*/step-*")}
    assert left == {"step-6", "step-7"}


@pytest.mark.slow
@pytest.mark.parametrize("event", ["shard half", "published"])
def test_killed_in_a_shared_save_beside_local_ones(tmp_path, straight, event):
    arguments = _kill(tmp_path, Fault("kill", event, SHARED))
    step, text = _resume(tmp_path, arguments, straight(RANKS))
    taken = SHARED if event in PUBLISHED else SHARED - 1
    assert step == taken
    kind = "shared checkpoint" if event in PUBLISHED else "local save"
    assert f"the {kind} of step {taken} is taken" in text


@pytest.mark.slow
def test_a_kill_and_a_lost_node_cost_one_local_interval(tmp_path, straight):
    arguments = _kill(tmp_path, Fault("kill", "step", 8, 1))
    shutil.rmtree(tmp_path / "node-1")
    step, text = _resume(tmp_path, arguments, straight(RANKS))
    assert step == 7
    assert "as rank 1 from that of rank 0" in text
