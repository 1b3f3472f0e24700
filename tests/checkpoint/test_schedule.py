"""After which steps a run saves, and what the ranks say to each other for that."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import count, pairwise
from typing import Any
from unittest.mock import patch

from titanlite.checkpoint.schedule import SaveSchedule
from titanlite.config.sections import Checkpoint
from titanlite.dist.dist_env import DistEnv


def _ask(
    world: DistEnv,
    config: Checkpoint,
    seconds: Sequence[float],
    steps: Iterable[int] = (),
) -> dict[str, Any]:
    """A step for each entry of `seconds`, which it takes on rank 0; on others time stands still.

    steps: their numbers, when they do not count from 1.
    """
    met: list[int] = []
    now = [0.0]
    broadcast = DistEnv.broadcast

    def counted(self: DistEnv, value: object) -> object:
        met.append(step)
        return broadcast(self, value)

    with patch.object(DistEnv, "broadcast", counted):
        schedule = SaveSchedule(config, world, clock=lambda: now[0])
        due = []
        times = []
        for step, took in zip(steps or count(1), seconds, strict=False):
            now[0] += took if world.rank == 0 else 0.0
            if schedule.due(step):
                schedule.begin(step)
                due.append(step)
                times.append(now[0])
    return {"due": due, "times": times, "met": met}


def test_steps_cost_no_communication(pool):
    config = Checkpoint(interval=10, milestones=[3, 14], enable_first_step_checkpoint=True)
    for found in pool(2).run(_ask, config, [1.0] * 25):
        assert found["due"] == [1, 3, 10, 14, 20]
        assert found["met"] == []
    config = Checkpoint(interval=10, milestones="powers_of_two")
    assert pool(2).run(_ask, config, [1.0] * 20)[0]["due"] == [1, 2, 4, 8, 10, 16, 20]


def test_the_clock_of_rank_0_decides_for_all_and_is_seldom_asked(pool):
    config = Checkpoint(interval=100, interval_type="seconds")
    here, there = pool(2).run(_ask, config, [60.0] + [0.5] * 2000)
    assert here["due"] == there["due"]
    saved = [60.0, *here["times"]]  # the first interval begins after the first step
    gaps = [now - before for before, now in pairwise(saved)]
    assert len(gaps) > 8
    assert all(100 <= gap <= 100 * 33 / 32 for gap in gaps), "late by a thirty-second at most"
    assert here["met"] == there["met"]
    assert len(here["met"]) < 1200


def test_a_run_that_goes_back_saves_in_time(pool):
    """From step 59 to step 5: the clock is asked before step 60 comes again."""
    config = Checkpoint(interval=50, interval_type="seconds")
    (found, _) = pool(2).run(_ask, config, [1.0] * 160, steps=[*range(1, 60), *range(5, 110)])
    assert found["times"] == [51, 101, 151]
