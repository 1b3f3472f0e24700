"""Stopping and stalling on a GPU, where the host learns of a step when the next is under way."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest

from tests.training import test_preemption as preemption
from tests.training import test_text_that_does_not_come as hanging
from tests.words import listening
from titanlite import exit_codes
from titanlite.config.sections.run import Comm, Stall
from titanlite.metrics.watchdog import HangWatchdog
from titanlite.parallel.world import World

STEPS = "--training.steps=8"


def test_a_signal_stops_after_the_next_step_and_the_run_goes_on_the_same(world: World, tmp_path: Path) -> None:
    straight, stopped = tmp_path / "straight", tmp_path / "stopped"
    preemption._run(world, str(straight), "", 0, 0, 0, STEPS)
    ended = preemption._run(world, str(stopped), "backward", 3, 0, signal.SIGTERM, STEPS)
    assert ended["code"] == exit_codes.PREEMPTED and ended["saved"] and 4 <= ended["step"] <= 5
    ended = preemption._run(world, str(stopped), "", 0, 0, 0, STEPS)
    assert (ended["step"], ended["code"]) == (8, exit_codes.DONE)
    assert not [line for line in ended["said"] if "NOT VERIFIED" in line]
    assert preemption._losses(stopped) == pytest.approx(preemption._losses(straight), rel=1e-5)


@pytest.mark.parametrize("interval", [100, 1])
def test_text_that_does_not_come_keeps_nobody(world: World, tmp_path: Path, interval: int) -> None:
    """The step after the one without text is begun before the host knows; both are taken back."""
    every = f"--checkpoint.interval={interval}"
    ended = hanging._run(world, str(tmp_path), ("loader", 0, 12), False, every)
    assert (ended["step"], ended["saved"], ended["code"]) == (3, True, exit_codes.PREEMPTED), ended["said"]
    assert ended["seconds"] < hanging.IN_TIME
    assert {step for step, _ in hanging._figures(tmp_path)} == {1, 2, 3}
    ended = hanging._run(world, str(tmp_path), None, False, every)
    assert (ended["step"], ended["code"]) == (8, exit_codes.DONE)
    assert not [line for line in ended["said"] if "NOT VERIFIED" in line]


def test_a_stall_is_told_beside_nccl(world: World) -> None:
    with listening() as said, HangWatchdog(Stall(deadline_seconds=1), Comm(init_timeout_seconds=1), end=None) as stalls:
        stalls.phase("forward", 1)
        stalls.phase("data", 2)
        until = time.monotonic() + 20
        while not stalls.verdict and time.monotonic() < until:
            time.sleep(0.1)
    assert "in data of step 2" in stalls.verdict and any("no progress for" in line for line in said)
