"""Deadlines of the watch over stalled ranks come before the collectives' own timeouts."""

from __future__ import annotations

import pytest

from titanlite.config.errors import ConfigError
from titanlite.config.plans import StallPlan
from titanlite.prepare import load_plans


def _plan(*flags: str) -> StallPlan:
    return load_plans("debug_model.toml", 2, flags).stall


@pytest.mark.parametrize(
    ("flags", "plan"),
    [
        ([], StallPlan(60.0, 180.0, 2.0)),
        (["--comm.train_timeout_seconds=10", "--comm.init_timeout_seconds=600"], StallPlan(6.0, 360.0, 2.0)),
        (["--comm.train_timeout_seconds=5"], StallPlan(3.0, 180.0, 1.5)),  # twice in the deadline
        (["--stall.deadline_seconds=20", "--stall.heartbeat_seconds=20"], StallPlan(20.0, 180.0, 10.0)),
        (["--stall.deadline_seconds=900", "--comm.train_timeout_seconds=1000"], StallPlan(900.0, 900.0, 2.0)),
        (["--stall.deadline_seconds=0", "--stall.heartbeat_seconds=20"], StallPlan(0.0, 180.0, 20.0)),
    ],
)
def test_deadlines_follow_the_timeouts(flags: list[str], plan: StallPlan) -> None:
    found = _plan(*flags)
    assert [found.deadline_seconds, found.patience_seconds, found.heartbeat_seconds] == pytest.approx(
        [plan.deadline_seconds, plan.patience_seconds, plan.heartbeat_seconds]
    )


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
