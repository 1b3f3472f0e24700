"""Deadlines of slow steps come before the collectives' own timeouts."""

from __future__ import annotations

import time

import pytest
from titanlite.config.plans import StallPlan

from titanlite.metrics.watchdog import HangWatchdog


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_phase_is_reported_by_what_earlier_steps_took(monkeypatch: pytest.MonkeyPatch, ranks: int) -> None:
    now = 0.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    stalls = HangWatchdog(StallPlan(deadline_seconds=60, patience_seconds=180, latest_seconds=80))
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
