"""A collective that fails leaves a record of every rank that the tool for it can read."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.pool import Pools
from titanlite.config.plans import CommPlan
from titanlite.parallel.flight_recorder import recording, write_record
from titanlite.parallel.world import World
from titanlite.prepare import load_plans

ROOT = Path(__file__).resolve().parents[2]
NAMES = [
    "TORCH_FR_BUFFER_SIZE",
    "TORCH_NCCL_TRACE_BUFFER_SIZE",
    "TORCH_NCCL_DUMP_ON_TIMEOUT",
    "TORCH_FR_DUMP_TEMP_FILE",
    "TORCH_NCCL_DEBUG_INFO_TEMP_FILE",
]
CUDA, CPU = torch.device("cuda"), torch.device("cpu")


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


def _set() -> dict[str, str]:
    return {name: os.environ[name] for name in NAMES if name in os.environ}


def test_nccl_is_told_to_leave_its_record_in_the_run_folder(environment: pytest.MonkeyPatch, tmp_path: Path) -> None:
    plan = load_plans("debug_model.toml", 2, [f"--job.dump_folder={tmp_path}", "--comm.trace_buf_size=7"]).comm
    with recording(plan, CUDA, 2):
        assert _set() == {
            "TORCH_FR_BUFFER_SIZE": "7",
            "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
            "TORCH_FR_DUMP_TEMP_FILE": str(tmp_path / "comm_traces" / "rank_"),
        }
        assert (tmp_path / "comm_traces").is_dir(), "the watchdog opens the file, and makes no folder"
    assert _set() == {}, "a later run in this process is not told where the first one's records go"


def test_zero_turns_it_off(environment: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with recording(CommPlan(trace_buf_size=0, trace_folder=str(tmp_path)), CUDA, 2):
        assert _set() == {"TORCH_FR_BUFFER_SIZE": "0"}, "without it torch keeps 2,000"


def test_what_the_user_set_stays(environment: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Under the older names too, which torch passes over when the newer ones are there."""
    mine = {
        "TORCH_NCCL_TRACE_BUFFER_SIZE": "3",
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
        "TORCH_NCCL_DEBUG_INFO_TEMP_FILE": "/elsewhere/rank_",
    }
    for name, value in mine.items():
        environment.setenv(name, value)
    with recording(CommPlan(trace_folder=str(tmp_path)), CUDA, 2):
        assert _set() == mine
    assert _set() == mine


def test_one_rank_alone_records_nothing(environment: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with recording(CommPlan(trace_folder=str(tmp_path)), CPU, 1):
        assert _set() == {}


def _record(world: World, folder: str) -> None:
    dist.all_reduce(torch.ones(11))
    write_record(Path(folder) / f"rank_{world.rank}")


def test_gloos_record_names_groups_and_collectives(pool: Pools, tmp_path: Path) -> None:
    pool(2).run(_record, str(tmp_path))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["rank_0", "rank_1"]
    for rank in range(2):
        record = pickle.loads((tmp_path / f"rank_{rank}").read_bytes())
        assert record["pg_config"]["0"] == {"name": "0", "desc": "default_pg", "ranks": "[0, 1]"}
        last = record["entries"][-1]
        assert (last["profiling_name"], last["input_sizes"]) == ("gloo:all_reduce", [[11]])
        assert any(frame["filename"] == __file__ for frame in last["frames"])


def _fail(world: World, folder: str, text: str) -> float:
    began = time.perf_counter()
    with pytest.raises(RuntimeError), recording(CommPlan(trace_folder=folder), CPU, 2):
        dist.barrier()  # the other record must be newer than the beginning here
        raise RuntimeError(text)
    for name in NAMES:
        os.environ.pop(name, None)
    return time.perf_counter() - began


@pytest.mark.parametrize(
    ("text", "left"),
    [
        ("mat1 and mat2 shapes cannot be multiplied (2x3 and 4x5)", []),
        (
            "[/gloo/transport/tcp/pair.cc:547] Connection closed by peer [::1]:1",
            ["rank_0", "rank_1"],
        ),
        ("Timed out waiting 3000ms for recv operation to complete", ["rank_0", "rank_1"]),
    ],
)
def test_only_errors_of_collectives_leave_a_record(pool: Pools, tmp_path: Path, text: str, left: list[str]) -> None:
    took = pool(2).run(_fail, str(tmp_path), text)
    assert sorted(path.name for path in tmp_path.iterdir()) == left
    assert left or max(took) < 1


_APART = """
import sys, torch, torch.distributed as dist
from datetime import timedelta
from titanlite.config.plans import CommPlan, MeshPlan
from titanlite.parallel.world import World, set_timeouts
with World.open(CommPlan(trace_folder=sys.argv[1]), "cpu") as world:
    world.build_mesh(MeshPlan(2, 1, 2))
    set_timeouts(3)
    other = dist.new_group(timeout=timedelta(seconds=3), group_desc="other")
    if world.rank == 0:
        dist.all_reduce(torch.ones(11), group=other)
    dist.all_reduce(torch.ones(12))
"""


@pytest.mark.soak
def test_torchfrtrace_says_who_waited_where(tmp_path: Path) -> None:
    """Two ranks that wait for each other in different collectives."""
    script, folder = tmp_path / "apart.py", tmp_path / "comm_traces"
    script.write_text(_APART)
    launch = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2", "--rdzv_backend=c10d"]
    launch += ["--rdzv_endpoint=localhost:0", str(script), str(folder)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(launch, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    assert "Timed out" in done.stderr and f"torchfrtrace {folder}" in done.stderr
    tool = [sys.executable, "-m", "torch.distributed.flight_recorder.fr_trace", str(folder)]
    seen = subprocess.run(tool, capture_output=True, text=True, timeout=60)
    waits = [part.splitlines()[1:5] for part in seen.stderr.split("Not all ranks joining collective")[1:]]
    told = [(wait[1].rpartition(":")[2], *wait[2:]) for wait in waits]  # a group's number counts those of the mesh
    assert ("other", "collective: gloo:all_reduce", "missing ranks: {1}") in told
    assert ("default_pg", "collective: gloo:all_reduce", "missing ranks: {0}") in told
    assert f"{script}:11" in seen.stderr and f"{script}:12" in seen.stderr, "the lines of code that waited"
