"""Deadlines of the watch over stalled ranks come before the collectives' own timeouts."""

from __future__ import annotations

import time
from dataclasses import astuple

import pytest

from titanlite.config.errors import ConfigError
from titanlite.config.plans import StallPlan
from titanlite.metrics.watchdog import StallWatch
from titanlite.prepare import load_plans


def _plan(*flags: str) -> StallPlan:
    return load_plans("debug_model.toml", 2, flags).stall


@pytest.mark.parametrize(
    ("flags", "plan"),
    [
        ([], StallPlan(60.0, 180.0, 2.0)),
        (["--comm.train_timeout_seconds=10", "--comm.init_timeout_seconds=600"], StallPlan(6.0, 360.0, 2.0, 8.0)),
        (["--comm.train_timeout_seconds=5"], StallPlan(3.0, 180.0, 1.5, 4.0)),  # twice in the deadline
        (["--stall.deadline_seconds=20", "--stall.heartbeat_seconds=20"], StallPlan(20.0, 180.0, 10.0)),
        (["--stall.deadline_seconds=900", "--comm.train_timeout_seconds=1000"], StallPlan(900.0, 900.0, 2.0, 800.0)),
        (["--stall.deadline_seconds=0", "--stall.heartbeat_seconds=20"], StallPlan(0.0, 180.0, 20.0)),
    ],
)
def test_deadlines_follow_the_timeouts(flags: list[str], plan: StallPlan) -> None:
    assert astuple(_plan(*flags)) == pytest.approx(astuple(plan))


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--stall.deadline_seconds=100"], "comm.train_timeout_seconds = 100 ends a run that waits before that"),
        (
            ["--stall.deadline_seconds=5", "--stall.heartbeat_seconds=6"],
            "is 6.0, more than stall.deadline_seconds = 5.0",
        ),
    ],
)
def test_deadlines_that_never_come_are_refused(flags: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        _plan(*flags)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_phase_is_reported_by_what_earlier_steps_took(monkeypatch: pytest.MonkeyPatch, ranks: int) -> None:
    now = 0.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    stalls = StallWatch(StallPlan(deadline_seconds=60, patience_seconds=180, latest_seconds=80))
    stalls.size = ranks
    limits = []
    for step, seconds in enumerate([50, 15, 25, 10, 90, 10], start=1):
        stalls.phase("data", step)
        now += seconds - 1
        stalls.phase("forward")
        limits.append(stalls._limit(step, "forward"))
        now += 1
        stalls.phase("save")
        now += 500
    # Of the first step: patience. Then three times: the first one, the second one, the longest but for the first.
    assert limits == ([180, 150, 60, 75, 75, 270] if ranks == 1 else [180, 80, 60, 75, 75, 80])
    assert stalls._limit(7, "save") == 180
