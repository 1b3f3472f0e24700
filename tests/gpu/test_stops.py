"""Stopping and stalling on a GPU, where the host learns of a step when the next is under way."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.training import test_stop
from titanlite import exit_codes
from titanlite.parallel.dist_env import DistEnv

STEPS = "--training.steps=8"


def test_a_signal_stops_after_the_next_step_and_the_run_goes_on_the_same(world: DistEnv, tmp_path: Path) -> None:
    straight, stopped = tmp_path / "straight", tmp_path / "stopped"
    test_stop._run(world, str(straight), "", 0, 0, 0, STEPS)
    ended = test_stop._run(world, str(stopped), "backward", 3, 0, signal.SIGTERM, STEPS)
    assert ended["code"] == exit_codes.PREEMPTED and 4 <= ended["step"] <= 5
    ended = test_stop._run(world, str(stopped), "", 0, 0, 0, STEPS)
    assert (ended["step"], ended["code"]) == (8, exit_codes.DONE)
    assert not [line for line in ended["said"] if "NOT VERIFIED" in line]
    assert test_stop._losses(stopped) == pytest.approx(test_stop._losses(straight), rel=1e-5)
