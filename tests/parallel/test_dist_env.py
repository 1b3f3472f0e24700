"""Launcher variables, meshes and timeouts; a wrong environment is named; freed memory is used
again.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.attention import _cur_sdpa_kernel_backends

from tests.support import processes
from tests.support.pool import free_port
from tests.support.processes import ROOT, python
from titanlite.dist import ParallelismError
from titanlite.dist.dist_env import DistEnv
from titanlite.dist.flight_recorder import recording
from titanlite.dist.launch_env import LaunchEnv, read_launch_env
from titanlite.dist.process_settings import TUNABLES, kernel_order
from titanlite.metrics.timeouts import patience, set_timeouts


def _timeouts(world: DistEnv) -> dict[str, timedelta]:
    mesh = world.build_mesh(dp_shard=world.size)
    model = nn.Linear(4, 4)
    # Within nodes of 2: a group of its own.
    fully_shard(model, mesh=mesh["dp_shard"], reshard_after_forward=2)
    world.apply_timeout()
    groups = {
        "default": dist.group.WORLD,
        "shard": mesh["dp_shard"].get_group(),
        "rep": mesh["dp_replicate"].get_group(),
        "partial reshard": model._get_fsdp_state()._fsdp_param_group.post_forward_mesh_info.shard_process_group,  # noqa: E501
    }

    def read() -> dict[str, Any]:
        return {
            name: g._get_backend(torch.device("cpu")).options._timeout
            for name, g in groups.items()
            if g
        }

    assert set(read().values()) == {timedelta(seconds=300)}
    set_timeouts(77)
    with patience(99, 77):
        assert set(read().values()) == {timedelta(seconds=99)}
    after = read()
    set_timeouts(300)
    return after


@pytest.mark.parametrize(
    ("capability", "chosen", "expected"),
    [
        ((8, 0), "auto", ["FLASH_ATTENTION", "CUDNN_ATTENTION", "EFFICIENT_ATTENTION", "MATH"]),
        ((9, 0), "auto", ["CUDNN_ATTENTION", "FLASH_ATTENTION", "EFFICIENT_ATTENTION", "MATH"]),
        ((12, 0), "auto", ["FLASH_ATTENTION", "CUDNN_ATTENTION", "EFFICIENT_ATTENTION", "MATH"]),
        ((9, 0), "math", ["MATH", "FLASH_ATTENTION", "CUDNN_ATTENTION", "EFFICIENT_ATTENTION"]),
    ],
)
def test_a_gpu_tries_its_fastest_kernel_of_attention_first_unless_one_is_chosen(
    monkeypatch, capability, chosen, expected
):
    def order():
        return [kernel.name for kernel in _cur_sdpa_kernel_backends(with_priority=True)]

    monkeypatch.setenv("TORCH_CUDNN_SDPA_DEPRIORITIZED", "0")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    before = order()
    with kernel_order("cpu", chosen):
        assert order() == before
    with kernel_order("cuda"), kernel_order("cuda", chosen):
        assert order()[:4] == expected
    assert order() == before


def test_timeouts_are_lowered_for_every_group(pool):
    for after in pool(4).run(_timeouts):
        assert after == {
            name: timedelta(seconds=77) for name in ("default", "shard", "rep", "partial reshard")
        }


def _joins(world: DistEnv) -> tuple[int, int, bool, str]:
    with DistEnv.open("cpu") as inner:
        seen = inner.rank, inner.size
    with pytest.raises(ParallelismError) as wrong:
        world.build_mesh(dp_shard=3)
    return *seen, dist.is_initialized(), str(wrong.value)


def test_an_existing_group_is_joined_and_left_alone_and_wrong_degrees_are_refused(pool):
    for rank, found in enumerate(pool(2).run(_joins)):
        assert found == (rank, 2, True, "dp_shard 3 = 3, but there are 2 ranks")


_TWO = {"WORLD_SIZE": "2", "RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}
SIZE = "TORCH_FR_BUFFER_SIZE"
ON_TIMEOUT = "TORCH_NCCL_DUMP_ON_TIMEOUT"
PREFIX = "TORCH_FR_DUMP_TEMP_FILE"
OLD_SIZE = "TORCH_NCCL_TRACE_BUFFER_SIZE"
OLD_PREFIX = "TORCH_NCCL_DEBUG_INFO_TEMP_FILE"
RECORDER = [SIZE, OLD_SIZE, ON_TIMEOUT, PREFIX, OLD_PREFIX]


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> Callable[[dict[str, str]], None]:
    """Sets these variables of a rank and of the flight recorder, and no others of them."""

    def put(variables: dict[str, str]) -> None:
        for name in (*_TWO, "LOCAL_RANK", "LOCAL_WORLD_SIZE", *RECORDER):
            monkeypatch.delenv(name, raising=False)
        for name, value in variables.items():
            monkeypatch.setenv(name, value)

    return put


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        (
            {"WORLD_SIZE": "2"},
            "3 environment variables are wrong:\n  RANK is not set, but WORLD_SIZE is: start with",
        ),
        (
            _TWO | {"WORLD_SIZE": "two"},
            "WORLD_SIZE is 'two', expected a whole number of at least 1",
        ),
        (_TWO | {"RANK": "2"}, "RANK is '2', expected a whole number from 0 to 1: WORLD_SIZE is 2"),
        (
            _TWO | {"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "1"},
            "LOCAL_RANK is '1', expected a whole number from 0 to 0",
        ),
        (
            _TWO | {"MASTER_PORT": "99999"},
            "MASTER_PORT is '99999', expected a whole number from 1 to 65535",
        ),
    ],
)
def test_wrong_environments_are_named(environment, variables, message):
    environment(variables)
    with pytest.raises(ParallelismError) as error, DistEnv.open("cpu"):
        pass
    assert message in str(error.value)


def test_environments_of_launchers_are_read(environment):
    address = ("localhost", 29500)
    for variables, expected in [
        ({}, LaunchEnv(0, 1, 0, 1, None)),
        (
            _TWO | {"WORLD_SIZE": "16", "RANK": "9", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "8"},
            LaunchEnv(9, 16, 1, 8, address),
        ),
    ]:
        environment(variables)
        assert read_launch_env() == expected
    environment({"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"})
    assert read_launch_env((5, 8)) == LaunchEnv(5, 8, 1, 2, None)  # the group is there
    environment({"LOCAL_RANK": "one"})
    with pytest.raises(
        ParallelismError, match="LOCAL_RANK is 'one', expected a whole number from 0 to 7"
    ):
        read_launch_env((5, 8))
    environment({})
    with DistEnv.open("cpu") as world:
        assert (world.rank, world.size) == (0, 1)


_LIMITS = """
import json, os, resource
from titanlite.dist import ParallelismError
from titanlite.dist.open_files import allow_files
soft, hard = 64, 5000
resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
allow_files(512)
# a socket for each rank in four groups
files = [os.open(os.devnull, os.O_RDONLY) for _ in range(4 * 512)]
try:
    allow_files(1500)
except ParallelismError as error:
    print(json.dumps([*resource.getrlimit(resource.RLIMIT_NOFILE), str(error)]))
"""


def test_a_run_on_512_ranks_may_open_a_socket_for_each_in_every_group_and_too_many_are_refused():
    soft, hard, error = json.loads(python("-c", _LIMITS).stdout)
    assert soft == hard == 5000
    assert "may open 5,000 files, but 1,500 ranks need 6,256" in error
    assert "ulimit -Hn" in error


_FAULTS = """
import json, resource, torch
from titanlite.dist.process_settings import keep_freed_memory
torch.set_num_threads(1)
def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(8):
        kept = [torch.zeros(10 << 20) for _ in range(2)]  # 40 MiB: more than malloc keeps
        del kept
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
faults()
plain, done, = faults(), keep_freed_memory()
faults()
print(json.dumps([done, plain, faults()]))
"""


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{}, {"GLIBC_TUNABLES": TUNABLES}], ids=str)
def test_freed_memory_is_kept_for_the_next_step_unless_the_user_chose_settings(settings):
    done, plain, kept = json.loads(python("-c", _FAULTS, env=settings).stdout)
    assert done is not bool(settings)
    # 80 MiB at a time are 20,480 pages, fewer where they are huge. Those settings hold from the
    # start.
    assert (plain > 300) is ("GLIBC_TUNABLES" not in settings)
    assert kept < 300


_OWN_LOOP = """
import os, sys
import titanlite.assembly.fingerprints
from titanlite import DistEnv, build, load_config

def fail(*_):
    raise ValueError("only on this rank")

if os.environ["RANK"] == "1":
    # Before the checkpoints' process group is made.
    titanlite.assembly.fingerprints.fingerprints = fail
with DistEnv.open() as world:
    build(load_config("debug_model.toml", world.size, sys.argv[1:]), world)
"""


@pytest.mark.slow
def test_a_rank_that_raises_in_build_does_not_leave_the_others_waiting(tmp_path):
    """A loop without a watchdog and without torchrun.

    The group for saves waits for its ranks for half an hour.
    """
    address = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
    }
    flags = [
        f"--job.dump_folder={tmp_path}",
        "--training.steps=1",
        "--checkpoint.enable_checkpoint",
    ]
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", _OWN_LOOP, *flags],
            cwd=ROOT,
            env=processes.environment(**address, RANK=str(rank), LOCAL_RANK=str(rank)),
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        said = [rank.communicate(timeout=600)[1] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert "ValueError: only on this rank" in said[1]
    assert ranks[0].returncode
    assert "Connection closed by peer" in said[0]


#: The user's own, under the older names, which torch passes over when the newer ones are there.
OWN = {OLD_SIZE: "3", ON_TIMEOUT: "0", OLD_PREFIX: "/elsewhere/rank_"}


@pytest.mark.parametrize(
    ("own", "size", "expected"),
    [
        ({}, 7, {SIZE: "7", ON_TIMEOUT: "1", PREFIX: "{folder}/rank_"}),
        ({}, 0, {SIZE: "0"}),  # without it torch keeps 2,000
        (OWN, 7, OWN),
    ],
    ids=["nccl", "off", "the user's"],
)
def test_torch_gets_its_settings_unless_the_user_set_them(
    environment, tmp_path, own, size, expected
):
    def settings():
        return {name: os.environ[name] for name in RECORDER if name in os.environ}

    environment(own)
    folder = tmp_path / "traces"
    with recording(str(folder), size):
        assert settings() == {name: value.format(folder=folder) for name, value in expected.items()}
        # NCCL's watchdog opens the file, and makes no folder.
        assert folder.is_dir() is (size > 0)
    assert settings() == own, "a later run is not affected"
