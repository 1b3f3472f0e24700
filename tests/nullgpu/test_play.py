"""What stands for the ranks that do not exist, without a null GPU."""

from __future__ import annotations

import pytest

from tests.support.processes import python

START = """
import os, sys
from pathlib import Path
from tests.nullgpu.counts import nobody_else, set_ranks
from tests.nullgpu.play import no_waiting
set_ranks(3, 8, Path(sys.argv[1]))
from titanlite.dist.dist_env import DistEnv
with nobody_else(), no_waiting(), DistEnv.open("cpu") as world:
    print(world.rank, world.size, world.build_mesh(dp_shard=4, tp=2).size(), flush=True)
    os._exit(0)
"""


@pytest.mark.slow
def test_the_start_of_a_rank_waits_for_no_other(tmp_path):
    done = python("-c", START, tmp_path / "calls", timeout=50)
    assert done.stdout.split() == ["3", "8", "8"], done.stderr
