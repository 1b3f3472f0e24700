"""Deadlines of the hang watchdog come before the collectives' own timeouts."""

from __future__ import annotations

import pytest

from titanlite.config.errors import ConfigError
from titanlite.prepare import load_plans


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
        load_plans("debug_model.toml", 2, flags)
