"""After which steps a run saves, and what the ranks say to each other for that."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoint.runs import options, write
from tests.pool import Pools
from titanlite.checkpoint.schedule import GRACE_VARIABLE, SaveSchedule, grace_seconds, grace_warning
from titanlite.config.sections import Checkpoint
from titanlite.parallel.dist_env import DistEnv


class _Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def _ask(
    world: DistEnv, config: Checkpoint, seconds: Sequence[float], losses: dict[int, float] | None = None
) -> dict[str, Any]:
    """A step for each entry of `seconds`, which it takes on rank 0; on others time stands still."""
    met: list[int] = []
    clock, broadcast = _Clock(), DistEnv.broadcast

    def counted(self: DistEnv, value: object) -> object:
        met.append(step)
        return broadcast(self, value)

    DistEnv.broadcast = counted  # type: ignore[method-assign]
    try:
        schedule = SaveSchedule(config, world, clock=clock)
        due = []
        for step, took in enumerate(seconds, start=1):
            clock.now += took if world.rank == 0 else 0.0
            if schedule.due(step, (losses or {}).get(step)):
                schedule.begin(step)
                due.append((step, clock.now))
    finally:
        DistEnv.broadcast = broadcast  # type: ignore[method-assign]
    return {"due": [step for step, _ in due], "times": [time for _, time in due], "met": met}


def test_steps_cost_no_communication(pool: Pools) -> None:
    config = Checkpoint(interval=10, milestones=[3, 14], enable_first_step_checkpoint=True)
    for found in pool(2).run(_ask, config, [1.0] * 25):
        assert found["due"] == [1, 3, 10, 14, 20] and found["met"] == []
    config = Checkpoint(interval=10, milestones="powers_of_two")
    assert pool(2).run(_ask, config, [1.0] * 20)[0]["due"] == [1, 2, 4, 8, 10, 16, 20]


def test_the_clock_of_rank_0_decides_for_all_and_is_seldom_asked(pool: Pools) -> None:
    config = Checkpoint(interval=100, interval_type="seconds")
    here, there = pool(2).run(_ask, config, [60.0] + [0.5] * 1000)
    assert here["due"] == there["due"] == [201, 401, 601, 801, 1001], "the first interval begins after the first step"
    assert here["met"] == there["met"] and len(here["met"]) < 1000 / 8


def test_every_step_longer_than_the_interval_is_saved(pool: Pools) -> None:
    config = Checkpoint(interval=5, interval_type="seconds")
    assert pool(2).run(_ask, config, [7.0] * 6)[1]["due"] == [2, 3, 4, 5, 6]


def test_steps_that_become_slower_make_a_save_late_by_little(pool: Pools) -> None:
    config = Checkpoint(interval=160, interval_type="seconds")
    seconds = [1.0] * 100 + [5.0] * 40
    (found, _) = pool(2).run(_ask, config, seconds)
    first = found["times"][0] - 1.0  # since the first step
    assert 160 <= first <= 160 + 5 * 10


def _taken_back(world: DistEnv, config: Checkpoint) -> list[int]:
    clock = _Clock()
    schedule = SaveSchedule(config, world, clock=clock)
    due = []
    for step in [*range(1, 60), *range(20, 120)]:
        clock.now += 1.0
        if schedule.due(step):
            schedule.begin(step)
            due.append(int(clock.now))
    return due


def test_a_run_that_is_taken_back_meets_again(pool: Pools) -> None:
    config = Checkpoint(interval=50, interval_type="seconds")
    for due in pool(2).run(_taken_back, config):
        assert due == [51, 101, 151]


def _losses(folder: Path, keep_best: int) -> Checkpoint:
    return options(folder, interval=1000, keep_best=keep_best)


def test_a_loss_among_the_lowest_of_this_run_is_saved(pool: Pools, tmp_path: Path) -> None:
    for step, loss in ((10, 5.0), (20, 4.0)):
        write(tmp_path, step, validation_loss=loss)
    write(tmp_path, 30, validation_loss=1.0, weights_only=True)
    losses = {2: 6.0, 4: 5.0, 6: 4.5, 8: float("nan"), 10: 4.0, 12: 3.0}
    for found in pool(2).run(_ask, _losses(tmp_path, 2), [1.0] * 13, losses):
        # Nothing is saved here, so it is always 5.0 and 4.0 that are to be beaten.
        assert found["due"] == [6, 10, 12] and found["met"] == [2, 4, 6, 8, 10, 12]
    assert pool(2).run(_ask, _losses(tmp_path, 3), [1.0] * 3, losses)[0]["due"] == [2]
    assert pool(2).run(_ask, _losses(tmp_path, 0), [1.0] * 13, losses)[0]["met"] == []


@pytest.mark.parametrize(
    ("environment", "seconds"),
    [
        ({}, None),
        ({"TORCHELASTIC_RUN_ID": "x"}, 30.0),
        ({GRACE_VARIABLE: "300"}, 300.0),
        ({"TORCHELASTIC_RUN_ID": "x", GRACE_VARIABLE: "much"}, 30.0),
    ],
)
def test_grace_period_is_what_torchrun_was_told(environment: dict[str, str], seconds: float | None) -> None:
    assert grace_seconds(environment) == seconds


def test_a_save_that_is_likely_to_outlast_it_is_told_with_its_seconds() -> None:
    torchrun = {"TORCHELASTIC_RUN_ID": "x"}
    told = grace_warning(25.0, "the save of step 8", torchrun)
    assert told.startswith("the save of step 8 took 25.0s, and torchrun kills its workers 30.0s after a SIGTERM")
    assert f"{GRACE_VARIABLE}=105" in told
    assert grace_warning(19.0, "x", torchrun) == "" == grace_warning(1e6, "x", {})
    assert grace_warning(25.0, "x", {**torchrun, GRACE_VARIABLE: "300"}) == ""
