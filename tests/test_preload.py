"""Ranks of tests find imported what each of their runs needs."""

from __future__ import annotations

import sys

from tests.support.pool import Pools
from tests.support.preload import MODULES
from titanlite.parallel.dist_env import DistEnv


def _imported(world: DistEnv) -> set[str]:
    return set(sys.modules)


def test_a_rank_starts_with_what_a_plain_run_imports(pool: Pools) -> None:
    assert set(MODULES) - pool(1).run(_imported)[0] == set()
