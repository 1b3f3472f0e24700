"""The share of useful time on nodes that fail: papers, limits, a run followed event by event."""

from __future__ import annotations

import math
from dataclasses import astuple

import pytest

from tests.support.failing_run import FailingRun, Place
from titanlite.plan.goodput import (
    Failures,
    Save,
    Tier,
    best_intervals,
    daly,
    share_without_saves,
    shares,
    useful_share,
    young,
)

MINUTE = 60.0
HOUR = 3600.0
STRUCK = 10_000
SYNC = Save(5 * MINUTE)
ASYNC = Save(10.0, 300.0, 1.6)


def simulated(
    tiers: list[Tier], intervals: list[float], failures: Failures, struck: int = STRUCK
) -> FailingRun:
    """Return a run after so many failures."""
    places = [
        Place(interval, tier.save.visible, tier.save.hidden, tier.save.slowdown, tier.share)
        for tier, interval in zip(tiers, intervals, strict=True)
    ]
    run = FailingRun(places, failures.mean, failures.pause)
    run.run(struck)
    return run


@pytest.mark.parametrize(("mean_time", "said"), [(24 * HOUR, 117), (6 * HOUR, 57), (900, 9.1)])
def test_the_best_interval_is_that_of_figures_3_to_5_of_daly(mean_time: float, said: float) -> None:
    """Saves of 5 minutes, restarts of 10; the captions give minutes to two digits or three."""
    found = daly(5 * MINUTE, mean_time) / MINUTE
    assert float(f"{found:.{2 if said < 100 else 3}g}") == said
    assert young(5 * MINUTE, mean_time) == math.sqrt(2 * 5 * MINUTE * mean_time)
    best = best_intervals([Tier("shared", SYNC)], Failures(mean_time, 0, 600), 1.0)
    assert best[0] == pytest.approx(daly(5 * MINUTE, mean_time), rel=0.003)


#: Name → tiers, intervals, mean time between failures, time until the first step after one.
CASES: dict[str, tuple[list[Tier], list[float], float, float]] = {
    "saves that stop the steps": ([Tier("shared", SYNC)], [57 * MINUTE], 6 * HOUR, 600),
    "more failures than a run can bear": ([Tier("shared", SYNC)], [549], 900, 600),
    "saves beside steps": ([Tier("shared", ASYNC)], [30 * MINUTE], 6 * HOUR, 600),
    "long saves beside steps": ([Tier("shared", ASYNC)], [6 * MINUTE], HOUR, 600),
    "saves longer than their interval": ([Tier("shared", ASYNC)], [2 * MINUTE], HOUR, 600),
    "two tiers": (
        [Tier("local", Save(5), 0.5), Tier("shared", Save(20, 300, 1.3), 0.5)],
        [300, HOUR],
        3 * HOUR,
        300,
    ),
    "two tiers and many failures": (
        [Tier("local", Save(5), 0.3), Tier("shared", Save(60), 0.7)],
        [240, 1200],
        HOUR,
        300,
    ),
    "most failures leave the node": (
        [Tier("local", Save(2), 0.8), Tier("shared", Save(120), 0.2)],
        [200, 2 * HOUR],
        3 * HOUR,
        300,
    ),
}


@pytest.mark.slow_after(2)
@pytest.mark.parametrize("name", CASES)
def test_the_share_is_that_of_a_simulation_of_10_000_failures(name: str) -> None:
    """Within 1 % of the share; where most time is lost within 3 %, as it varies by 1 %."""
    tiers, intervals, mean_time, pause = CASES[name]
    failures = Failures(mean_time, pause / 4, 3 * pause / 4)
    run = simulated(tiers, intervals, failures)
    found = shares(tiers, intervals, failures)
    error = 0.03 if mean_time < HOUR else 0.01
    assert found.useful == pytest.approx(run.progress / run.clock, rel=error)
    assert found.restarts == pytest.approx(run.paused / run.clock, rel=0.03)
    assert sum(astuple(found)) == pytest.approx(1)
    assert min(astuple(found)) > 0


@pytest.mark.slow_after(2)
@pytest.mark.parametrize("name", ["saves that stop the steps", "saves beside steps", "two tiers"])
def test_no_other_interval_is_better_in_the_simulation(name: str) -> None:
    tiers, _, mean_time, pause = CASES[name]
    failures = Failures(mean_time, 0, pause)
    best = best_intervals(tiers, failures, 1.0)

    def share(intervals: list[float]) -> float:
        run = simulated(tiers, intervals, failures, struck=1000)
        return run.progress / run.clock

    at_best = share(best)
    for place in range(len(tiers)):
        for factor in (0.4, 2.5):
            other = [*best]
            other[place] *= factor
            assert share(other) < at_best
            assert useful_share(tiers, other, failures) < useful_share(tiers, best, failures)


def test_each_tier_has_about_the_interval_of_young_for_the_failures_that_need_it() -> None:
    tiers = CASES["most failures leave the node"][0]
    best = best_intervals(tiers, Failures(3 * HOUR, 0, 300), 1.0)
    for tier, interval in zip(tiers, best, strict=True):
        assert interval == pytest.approx(young(tier.save.cost, 3 * HOUR / tier.share), rel=0.06)


def test_without_failures_only_saves_take_time() -> None:
    never = Failures(1e15, 100, 300)
    assert useful_share([Tier("shared", SYNC)], [HOUR], never) == pytest.approx(3600 / 3900)
    beside = 3600 / (3600 + 10 + 300 * (1 - 1 / 1.6))
    assert useful_share([Tier("shared", ASYNC)], [HOUR], never) == pytest.approx(beside)
    two = [Tier("local", Save(2), 0.5), Tier("shared", SYNC, 0.5)]
    share = useful_share(two, [600, HOUR], never)
    assert share == pytest.approx(1 / (1 + 2 / 600 + 300 / 3600))


def test_saves_that_cost_nothing_leave_only_the_restarts() -> None:
    free = [Tier("shared", Save(0.0))]
    failures = Failures(10 * HOUR, 100, 500)
    best = best_intervals(free, failures, 0.5)
    assert best == [0.5], "after each step"
    assert useful_share(free, best, failures) == pytest.approx(math.exp(-600 / 36000), rel=1e-4)


def test_a_run_that_saves_nothing_begins_anew() -> None:
    failures = Failures(10 * HOUR, 0, 600)
    run = simulated([Tier("shared", Save(0.0))], [5 * HOUR], failures)
    assert share_without_saves(5 * HOUR, failures) == pytest.approx(
        run.progress / run.clock, rel=0.015
    )
    assert share_without_saves(1e9, failures) == 0.0
    assert useful_share([Tier("shared", SYNC)], [1e9], failures) == 0.0
