"""Ranks, meshes and timeouts; a world that is described wrongly says so."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from tests.pool import Pools
from titanlite import exit_codes
from titanlite.config.plans import MeshPlan
from titanlite.parallel.environment import Environment, read_environment
from titanlite.parallel.world import World, WorldError, patience, set_timeouts

ROOT = Path(__file__).resolve().parents[2]


def _timeouts(world: World) -> dict[str, timedelta]:
    mesh = world.build_mesh(MeshPlan(world.size, 1, world.size))
    model = nn.Linear(4, 4)
    fully_shard(model, mesh=mesh["dp_shard"], reshard_after_forward=2)  # within nodes of 2: a group of its own
    world.cover_groups()
    groups = {
        "default": dist.group.WORLD,
        "shard": mesh["dp_shard"].get_group(),
        "rep": mesh["dp_replicate"].get_group(),
        "partial reshard": model._get_fsdp_state()._fsdp_param_group.post_forward_mesh_info.shard_process_group,
    }

    def read() -> dict[str, Any]:
        return {
            name: group._get_backend(torch.device("cpu")).options._timeout for name, group in groups.items() if group
        }

    before = read()
    set_timeouts(77)
    with patience(99, 77):
        assert set(read().values()) == {timedelta(seconds=99)}
    after = read()
    set_timeouts(120)
    assert set(before.values()) == {timedelta(seconds=120)}
    return after


def test_timeouts_are_lowered_for_every_group(pool: Pools) -> None:
    for after in pool(4).run(_timeouts):
        assert after == {name: timedelta(seconds=77) for name in ("default", "shard", "rep", "partial reshard")}


def _joins(world: World) -> tuple[int, int, bool]:
    with World.open(device_type="cpu") as inner:
        seen = inner.rank, inner.size
    return *seen, dist.is_initialized()


def test_an_existing_world_is_joined_and_left_alone(pool: Pools) -> None:
    assert pool(2).run(_joins) == [(0, 2, True), (1, 2, True)]


def _wrong_mesh(world: World) -> str:
    try:
        world.build_mesh(MeshPlan(world.size, 1, 3))
    except WorldError as error:
        return str(error)
    return "accepted"


def test_degrees_that_do_not_fit_are_refused(pool: Pools) -> None:
    assert pool(2).run(_wrong_mesh) == ["dp_shard 3 = 3, but there are 2 ranks"] * 2


_TWO = {"WORLD_SIZE": "2", "RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}
_WRONG = [
    (
        {"WORLD_SIZE": "2"},
        "3 environment variables are wrong:\n  RANK is not set, but WORLD_SIZE is: start with torchrun",
    ),
    ({"RANK": "1"}, "environment variable WORLD_SIZE is not set, but RANK is"),
    (_TWO | {"MASTER_ADDR": ""}, "MASTER_ADDR is not set, but WORLD_SIZE is: set it to the host of rank 0"),
    (_TWO | {"WORLD_SIZE": "two"}, "WORLD_SIZE is 'two', expected a whole number of at least 1"),
    (_TWO | {"WORLD_SIZE": "0"}, "WORLD_SIZE is '0', expected a whole number of at least 1"),
    (_TWO | {"RANK": "2"}, "RANK is '2', expected a whole number from 0 to 1: WORLD_SIZE is 2"),
    (_TWO | {"RANK": "-1"}, "RANK is '-1', expected a whole number from 0 to 1: WORLD_SIZE is 2"),
    (
        _TWO | {"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "1"},
        "LOCAL_RANK is '1', expected a whole number from 0 to 0: LOCAL_",
    ),
    (_TWO | {"LOCAL_WORLD_SIZE": "8"}, "LOCAL_WORLD_SIZE is '8', expected a whole number from 1 to 2"),
    (_TWO | {"RANK": "1", "LOCAL_WORLD_SIZE": "1"}, "LOCAL_RANK is not set, but LOCAL_WORLD_SIZE is"),
    (_TWO | {"MASTER_PORT": "99999"}, "MASTER_PORT is '99999', expected a whole number from 1 to 65535"),
    (_TWO | {"MASTER_PORT": "0"}, "MASTER_PORT is '0', expected a whole number from 1 to 65535"),
]


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> Callable[[dict[str, str]], None]:
    """Sets the variables of a rank, and no others."""

    def put(variables: dict[str, str]) -> None:
        for name in ("WORLD_SIZE", "RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
            monkeypatch.delenv(name, raising=False)
        for name, value in variables.items():
            monkeypatch.setenv(name, value)

    return put


@pytest.mark.parametrize(("variables", "message"), _WRONG)
def test_wrong_environments_are_named(
    environment: Callable[[dict[str, str]], None], variables: dict[str, str], message: str
) -> None:
    environment(variables)
    with pytest.raises(WorldError) as told, World.open(device_type="cpu"):
        pass
    assert message in str(told.value)


def test_environments_as_launchers_set_them_are_read(environment: Callable[[dict[str, str]], None]) -> None:
    environment({})
    assert read_environment() == Environment(0, 1, 0, 1, None)
    environment({"WORLD_SIZE": "1", "RANK": "0", "LOCAL_RANK": "0", "MASTER_PORT": "0"})  # nobody needs the port
    assert read_environment() == Environment(0, 1, 0, 1, None)
    environment(_TWO | {"WORLD_SIZE": "16", "RANK": "9", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "8"})
    assert read_environment() == Environment(9, 16, 1, 8, ("localhost", 29500))
    environment(_TWO | {"RANK": "1", "LOCAL_RANK": "0"})  # two nodes with a rank each
    assert read_environment() == Environment(1, 2, 0, 1, ("localhost", 29500))


def test_a_group_that_exists_needs_no_variables(environment: Callable[[dict[str, str]], None]) -> None:
    for variables in ({"LOCAL_RANK": "1"}, {"RANK": "1", "LOCAL_RANK": "1", "MASTER_PORT": "x"}):
        environment(variables)
        assert read_environment(joined=(1, 2)) == Environment(1, 2, 1, 2, None)


def test_train_py_tells_a_wrong_environment_without_torch(
    environment: Callable[[dict[str, str]], None], tmp_path: Path
) -> None:
    environment(_TWO | {"RANK": "2"})
    code = (
        "import sys; from titanlite import main\n"
        "main.exit_now = lambda code, _: sys.exit(code + 40 * ('torch' in sys.modules))\n"
        "main.main()"
    )
    command = [sys.executable, "-c", code, f"--job.dump_folder={tmp_path}"]
    done = subprocess.run(command, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True)
    told = "error: environment variable RANK is '2', expected a whole number from 0 to 1: WORLD_SIZE is 2\n"
    assert (done.returncode, done.stderr) == (exit_codes.CONFIG, told)


_RESTARTS = """
import os, sys, torch, torch.distributed as dist
from titanlite.parallel.world import World
attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]
with World.open(device_type="cpu") as world:
    x = torch.ones(()); dist.all_reduce(x)
    if attempt == "0" and world.rank == 1:
        os._exit(7)
    dist.all_reduce(x)
    os.write(1, f"attempt {attempt} rank {world.rank} sum {int(x)}\\n".encode())  # whole, so lines cannot mix
os._exit(0)
"""


@pytest.mark.soak
def test_restarted_workers_meet_again(tmp_path: Path) -> None:
    """The agent's store outlives the workers: without keys per attempt the restart often hangs."""
    script = tmp_path / "restarts.py"
    script.write_text(_RESTARTS)
    launch = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2", "--max-restarts=1"]
    launch += ["--rdzv_backend=c10d", "--rdzv_endpoint=localhost:0", str(script)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(launch, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert sorted(line for line in done.stdout.splitlines() if line.startswith("attempt 1")) == [
        "attempt 1 rank 0 sum 4",
        "attempt 1 rank 1 sum 4",
    ]
