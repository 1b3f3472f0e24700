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
from tests.support.train_runs import batches, flags, rows, train, unequal
from titanlite import exit_codes

RANKS = 2
SHARED = 4
#: The new local save is there at these events of the rank that is killed.
DONE = ("local published", "local prune")


def _arguments(folder: Path, *more: str) -> list[str]:
    return flags(
        folder / "run",
        f"--checkpoint.interval={SHARED}",
        f"--checkpoint.local_folder={folder}/node-{{local_rank}}",
        "--checkpoint.local_interval=1",
        "--checkpoint.local_copies=1",
        *more,
    )


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run without a fault and without local saves."""
    folder = tmp_path_factory.mktemp("straight")
    more = f"--checkpoint.interval={SHARED}"
    codes, text = train(flags(folder / "run", more), RANKS, folder / "console")
    assert codes == [exit_codes.DONE] * RANKS, text
    return folder


def _same(folder: Path, straight: Path) -> None:
    run, other = folder / "run", straight / "run"
    assert rows(run) == rows(other), "each step once, with the numbers of the run without a fault"
    assert batches(run, RANKS) == batches(other, RANKS), "no sequence left out, none twice"
    assert unequal(run, other) == []


def _resumed(text: str) -> int:
    (step,) = re.findall(r"resumed from step (\d+)", text)
    return int(step)


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
    arguments = _arguments(tmp_path, f"--checkpoint.async_mode={mode}")
    fault = Fault("kill", event, struck, rank)
    codes, text = train(arguments, RANKS, tmp_path / "killed", fault)
    assert codes[rank] == -signal.SIGKILL, text
    codes, text = train(arguments, RANKS, tmp_path / "resumed")
    assert codes == [exit_codes.DONE] * RANKS, text
    step = _resumed(text)
    if event in DONE:
        assert step == struck
    else:
        # The other rank may have published: then all parts are there.
        assert step in (struck - 1, struck)
    assert f"the local save of step {step} is taken" in text
    _same(tmp_path, straight)
    left = {path.name for path in tmp_path.glob("node-*/run-*/*/step-*")}
    assert left == {"step-6", "step-7"}


@pytest.mark.slow
@pytest.mark.parametrize("event", ["shard half", "published"])
def test_killed_in_a_shared_save_beside_local_ones(tmp_path, straight, event):
    arguments = _arguments(tmp_path)
    codes, text = train(arguments, RANKS, tmp_path / "killed", Fault("kill", event, SHARED))
    assert codes[0] == -signal.SIGKILL, text
    codes, text = train(arguments, RANKS, tmp_path / "resumed")
    assert codes == [exit_codes.DONE] * RANKS, text
    taken = SHARED if event in PUBLISHED else SHARED - 1
    assert _resumed(text) == taken
    kind = "shared checkpoint" if event in PUBLISHED else "local save"
    assert f"the {kind} of step {taken} is taken" in text
    _same(tmp_path, straight)


@pytest.mark.slow
def test_a_kill_and_a_lost_node_cost_one_local_interval(tmp_path, straight):
    arguments = _arguments(tmp_path)
    train(arguments, RANKS, tmp_path / "killed", Fault("kill", "step", 8, 1))
    shutil.rmtree(tmp_path / "node-1")
    codes, text = train(arguments, RANKS, tmp_path / "resumed")
    assert codes == [exit_codes.DONE] * RANKS, text
    assert _resumed(text) == 7
    assert "as rank 1 from that of rank 0" in text
    _same(tmp_path, straight)
