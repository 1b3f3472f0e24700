"""Killed at each event of a local save, or of a shared one beside local ones: at most the local
interval is lost, and the end is the same.
"""

from __future__ import annotations

import random
import re
import shutil
import signal
import time
from pathlib import Path

import pytest

from tests.support.checkpoints import flip
from tests.support.faults import LOCAL_EVENTS, PUBLISHED, SAVE_EVENTS, Fault
from tests.support.ranks import Ranks
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


LOCAL = [
    *(("disabled", event, 0) for event in LOCAL_EVENTS),
    ("disabled", "local part half", 1),
    ("disabled", "local publish", 1),
    *(
        pytest.param("async", event, rank, marks=pytest.mark.soak)
        for event, rank in [("local part half", 1), ("local publish", 0), ("local prune", 1)]
    ),
]


@pytest.mark.slow
@pytest.mark.parametrize(("mode", "event", "rank"), LOCAL)
def test_killed_in_a_local_save(
    tmp_path: Path, straight: Path, mode: str, event: str, rank: int
) -> None:
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
@pytest.mark.parametrize(
    "event",
    [
        "shard half",
        "publish",
        "published",
        *(
            pytest.param(event, marks=pytest.mark.soak)
            for event in SAVE_EVENTS
            if not event.startswith("prune") and event not in ("shard half", "publish", "published")
        ),
    ],
)
def test_killed_in_a_shared_save_beside_local_ones(
    tmp_path: Path, straight: Path, event: str
) -> None:
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
def test_a_kill_and_a_flipped_bit_cost_two_local_intervals(tmp_path: Path, straight: Path) -> None:
    arguments = _arguments(tmp_path)
    train(arguments, RANKS, tmp_path / "killed", Fault("kill", "step", 8, 1))
    for part in tmp_path.glob("node-*/run-*/*-1/step-7/*.safetensors"):
        flip(part)
    codes, text = train(arguments, RANKS, tmp_path / "resumed")
    assert codes == [exit_codes.DONE] * RANKS, text
    assert _resumed(text) == 6
    assert "has changed since it was written" in text
    _same(tmp_path, straight)


@pytest.mark.slow
def test_a_stop_by_a_signal_writes_a_shared_checkpoint(tmp_path: Path, straight: Path) -> None:
    arguments = _arguments(tmp_path)
    codes, text = train(arguments, RANKS, tmp_path / "stopped", Fault("term", "step", 6, 0))
    assert codes == [exit_codes.PREEMPTED] * RANKS, text
    codes, text = train(arguments, RANKS, tmp_path / "resumed")
    assert codes == [exit_codes.DONE] * RANKS, text
    assert re.search(r"the shared checkpoint of step [67] is taken", text)
    _same(tmp_path, straight)


@pytest.mark.slow
def test_a_rollback_takes_the_newest_local_save_and_drops_none_before(tmp_path: Path) -> None:
    arguments = _arguments(tmp_path, "--guard.policy=rollback")
    codes, text = train(arguments, RANKS, tmp_path / "console", Fault("nan", "step", 7, 1))
    assert codes == [exit_codes.DONE] * RANKS, text
    assert "Rolled back to the checkpoint of step 6" in text
    assert "the local save of step 6 is taken" in text


@pytest.mark.slow
def test_an_average_of_the_weights_goes_on_from_a_local_save(tmp_path: Path) -> None:
    more = ["--optimizer.ema_decay=0.9"]
    codes, text = train(_arguments(tmp_path / "whole", *more), RANKS, tmp_path / "console")
    assert codes == [exit_codes.DONE] * RANKS, text
    arguments = _arguments(tmp_path / "killed", *more)
    train(arguments, RANKS, tmp_path / "console", Fault("kill", "step", 8, 0))
    codes, text = train(arguments, RANKS, tmp_path / "console")
    assert codes == [exit_codes.DONE] * RANKS, text
    assert _resumed(text) == 7
    _same(tmp_path / "killed", tmp_path / "whole")


@pytest.mark.soak
@pytest.mark.parametrize("mode", ["disabled", "async"])
def test_random_kills_cost_one_local_interval_each(
    tmp_path: Path, straight: Path, mode: str
) -> None:
    """Of one rank or all, at any moment from the first step on."""
    chance = random.Random(5)
    kills = 0
    life = 0
    # On an idle machine some lives end before their kill.
    while life < 5 or kills < 5:
        folder = tmp_path / f"life-{life}"
        folder.mkdir()
        arguments = _arguments(folder, f"--checkpoint.async_mode={mode}")
        last = 0
        while True:
            with Ranks(arguments, RANKS, folder / "console", main="tests.support.logged") as ranks:
                _await(ranks, r"resumed from step \d+|a fresh run")
                begun = re.findall(r"resumed from step (\d+)", ranks.output())
                least = last - 1 if mode == "disabled" else _surely_saved(last)
                assert int(begun[0] if begun else 0) >= least
                time.sleep(chance.uniform(0.0, 1.0))
                if all(process.exitcode is not None for process in ranks.processes):
                    assert ranks.wait() == [exit_codes.DONE] * RANKS
                    break
                victim = chance.choice([0, 1, None])
                ranks.send(signal.SIGKILL, victim)
                kills += 1
                if victim is not None:
                    ranks.wait()
            last = _last_step(folder / "run")
        _same(folder, straight)
        life += 1


def _surely_saved(last: int) -> int:
    """The step of which a save in the background has ended before step `last` is recorded; else 0.

    A local save waits for the local one before it. Shared ones do not, and take its place.
    """
    begun = [step for step in range(1, last) if step % SHARED]
    return begun[-2] if len(begun) > 1 else 0


def _last_step(run: Path) -> int:
    """The last step that an attempt recorded; 0 where the kill came before the first."""
    if not (run / "metrics.jsonl").exists():
        return 0
    return max((row[0] for row in rows(run)), default=0)


def _await(ranks: Ranks, pattern: str) -> None:
    while not re.search(pattern, ranks.output()):
        assert all(process.exitcode is None for process in ranks.processes), ranks.output()
        time.sleep(0.01)


@pytest.mark.slow
def test_a_kill_and_a_lost_node_cost_one_local_interval(tmp_path: Path, straight: Path) -> None:
    arguments = _arguments(tmp_path)
    train(arguments, RANKS, tmp_path / "killed", Fault("kill", "step", 8, 1))
    shutil.rmtree(tmp_path / "node-1")
    codes, text = train(arguments, RANKS, tmp_path / "resumed")
    assert codes == [exit_codes.DONE] * RANKS, text
    assert _resumed(text) == 7
    assert "as rank 1 from that of rank 0" in text
    _same(tmp_path, straight)
