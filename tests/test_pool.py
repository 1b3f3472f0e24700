"""What a pool of ranks tells when one of its processes dies."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.support.pool import RankFailure, RankPool
from titanlite.parallel.dist_env import DistEnv


def rank_of(world: DistEnv) -> int:
    return world.rank


def die(world: DistEnv) -> None:
    os.abort()


@pytest.fixture
def ranks() -> Iterator[RankPool]:
    ranks = RankPool(1)
    yield ranks
    ranks.close()


def test_a_death_is_told_with_its_signal_its_stacks_and_the_jobs_before(ranks: RankPool) -> None:
    for _ in range(3):
        assert ranks.run(rank_of) == [0]
    with pytest.raises(RankFailure) as failure:
        ranks.run(die)
    told = str(failure.value)
    assert "rank 0:\nthe process died: SIGABRT" in told
    assert "in die\n" in told
    name = "tests/test_pool.py::test_a_death_is_told_with_its_signal_its_stacks_and_the_jobs_before"
    assert f"  rank_of in {name} (call), 3 times\n  die in {name} (call)" in told
    # The next job starts new processes.
    assert ranks.run(rank_of) == [0]
