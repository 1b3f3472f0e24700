"""Ranks of tests find imported what each of their runs needs."""

from __future__ import annotations

import os
import sys

import pytest

from tests.support.pool import Pools
from tests.support.preload import MODULES
from titanlite.dist.dist_env import DistEnv


def _imported(world: DistEnv) -> set[str]:
    with pytest.raises(OSError, match="descriptor"):
        os.fsync(-1)
    assert os.fsync.__module__ == "tests.support.unsynced"
    return set(sys.modules)


def test_a_rank_starts_with_what_a_plain_run_imports(pool: Pools) -> None:
    assert set(MODULES) - pool(1).run(_imported)[0] == set()
