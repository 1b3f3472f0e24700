"""Saves in the background: what they hold, how they fail, what a crash leaves."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.checkpoint.runs import PRINTS, RUN, train
from tests.pool import Pools
from tests.steps import train_step
from tests.training.harness import build_tiny, full, micro_batches
from titanlite.checkpoint import Checkpointer, CheckpointError, checkpointer
from titanlite.checkpoint.contents import Contents, compare
from titanlite.checkpoint.manifest import find, steps_in
from titanlite.data.loader import to_device
from titanlite.guard import FiniteGuard
from titanlite.parallel.dist_env import DistEnv, set_timeouts

ASYNC = CheckpointPlan(async_mode="async")
ROOT = Path(__file__).resolve().parents[2]


def _equal(a: Path, b: Path) -> None:
    differing = [one.name for one in compare(Contents(a), Contents(b)) if one.elements or one.left != one.right]
    assert differing == []


@pytest.mark.parametrize("mode", ["async", "async_with_pinned_mem"])
def test_holds_what_a_save_in_the_foreground_holds(pool: Pools, tmp_path: Path, mode: str) -> None:
    """Bit for bit, though the weights change while it is written; and training itself does not notice."""
    plan = CheckpointPlan(async_mode=mode)  # type: ignore[arg-type]
    there = pool(2).run(train, RUN, str(tmp_path / "sync"), 1, 6, every=2)
    here = pool(2).run(train, RUN, str(tmp_path / "async"), 1, 6, every=2, plan=plan)
    assert [result["losses"] for result in here] == [result["losses"] for result in there]
    assert steps_in(tmp_path / "async") == [2, 4, 6]
    for step in (2, 4, 6):
        _equal(tmp_path / "async" / f"step-{step}", tmp_path / "sync" / f"step-{step}")
    assert [outcome.step for outcome in here[0]["outcomes"]] == [2, 4, 6] and here[1]["outcomes"] == []
    assert not any(outcome.problem for outcome in here[0]["outcomes"])
    resumed = pool(2).run(train, RUN, str(tmp_path / "async"), 7, 9, plan=plan)
    straight = pool(2).run(train, RUN, str(tmp_path / "straight"), 1, 9)
    assert resumed[0]["losses"] == straight[0]["losses"][6:]


def _overwrite_while_saving(world: DistEnv, folder: str) -> tuple[bool, bool, list[float]]:
    """Hold the write back, spoil the weights, let it go on: whether it was in flight, and what was saved before."""
    model, optimizer, _ = build_tiny(world, RUN)
    held = threading.Event()
    real = checkpointer.dcp.save

    def late(*args: Any, **kwargs: Any) -> Any:
        assert held.wait(30)
        return real(*args, **kwargs)

    saver = Checkpointer(CheckpointPlan(enable=True, folder=folder, async_mode="async"), world, PRINTS)
    before = [full(p).sum().item() for p in model.parameters()]
    checkpointer.dcp.save = late  # type: ignore[assignment]
    try:
        saver.save(1, model, optimizer, {})
        in_flight, published = saver.in_flight, (Path(folder) / "step-1").exists()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(9.0)
        held.set()
        saver.wait()
    finally:
        checkpointer.dcp.save = real
        saver.close()
    return in_flight, published, before


def test_the_copy_is_complete_before_weights_change(pool: Pools, tmp_path: Path) -> None:
    in_flight, published, before = pool(2).run(_overwrite_while_saving, str(tmp_path))[0]
    assert in_flight and not published
    contents = Contents(tmp_path / "step-1")
    names = [name for name in contents.manifest.tensors if name.startswith("model.")]
    assert sorted(contents.read(name).sum().item() for name in names) == pytest.approx(sorted(before))


def _copy_beside_the_next_step(world: DistEnv, folder: str) -> dict[str, Any]:
    """Hold the copy back: what goes on meanwhile, what does not, and what was to be saved."""
    model, optimizer, rank = build_tiny(world, RUN)
    guard = FiniteGuard(world.device)
    saver = Checkpointer(CheckpointPlan(enable=True, folder=folder, async_mode="async_with_pinned_mem"), world, PRINTS)
    assert saver._background is not None
    stager, held = saver._background._stager, threading.Event()
    real, seen = stager.stage, {}
    stager.stage = lambda tensors: (held.wait(60), real(tensors))[1]  # type: ignore[method-assign]

    def step(number: int, before_update: Any) -> None:
        data = to_device(micro_batches(RUN, number - 1, rank, world.size), world.device)
        train_step(model, optimizer, data, step=number, lr=0.1, max_norm=1.0, guard=guard, before_update=before_update)

    def before_update() -> None:
        seen["held back"] = not held.is_set()  # forward and backward are done
        threading.Timer(0.5, held.set).start()
        saver.await_copy()
        seen["awaited"] = held.is_set()

    try:
        step(1, saver.await_copy)
        before = {name: full(p).clone() for name, p in model.named_parameters()}
        saver.save(1, model, optimizer, {})
        step(2, before_update)
        saver.wait()
    finally:
        held.set()
        saver.close()
    moved = any(not torch.equal(full(p), before[name]) for name, p in model.named_parameters())
    return {**seen, "moved": moved, "before": before}


def test_the_copy_is_made_beside_forward_and_backward_and_awaited_before_the_update(
    pool: Pools, tmp_path: Path
) -> None:
    found = pool(2).run(_copy_beside_the_next_step, str(tmp_path))
    assert all(one["held back"] and one["awaited"] and one["moved"] for one in found)
    contents = Contents(tmp_path / "step-1")
    for name, weight in found[0]["before"].items():
        assert torch.equal(contents.read(f"model.{name}"), weight), name


def _copy_fails(world: DistEnv, folder: str) -> str:
    model, optimizer, _ = build_tiny(world, RUN)
    saver = Checkpointer(CheckpointPlan(enable=True, folder=folder, async_mode="async_with_pinned_mem"), world, PRINTS)
    assert saver._background is not None

    def full_up(_: Any) -> Any:
        raise MemoryError("no host memory")

    saver._background._stager.stage = full_up  # type: ignore[method-assign]
    saver.save(1, model, optimizer, {})
    saver.await_copy()  # not for ever
    try:
        saver.wait()
    except CheckpointError as error:
        return str(error)
    finally:
        saver.close()
    return ""


def test_a_copy_that_fails_is_a_save_that_fails(pool: Pools, tmp_path: Path) -> None:
    assert pool(2).run(_copy_fails, str(tmp_path)) == ["no host memory"] * 2
    assert steps_in(tmp_path) == []


def _fails_once(world: DistEnv, folder: str, bad_rank: int) -> dict[str, Any]:
    """The first save fails on one rank; the next one is tried."""
    model, optimizer, _ = build_tiny(world, RUN)
    saver = Checkpointer(CheckpointPlan(enable=True, folder=folder, async_mode="async"), world, PRINTS)
    writer = checkpointer.HashingWriter

    class Full(writer):  # type: ignore[misc,valid-type]
        def write_data(self, *args: Any) -> Any:
            if world.rank == bad_rank:
                raise OSError(28, "No space left on device")
            return super().write_data(*args)

    checkpointer.HashingWriter = Full  # type: ignore[misc]
    try:
        saver.save(1, model, optimizer, {})
        try:
            saver.wait()
            error = ""
        except CheckpointError as failure:
            error = str(failure)
    finally:
        checkpointer.HashingWriter = writer  # type: ignore[misc]
    outcome = saver.poll()
    again = saver.poll()
    group = saver._background._group if saver._background else None
    saver.save(2, model, optimizer, {})
    saver.wait()
    renewed = saver._background is not None and saver._background._group is not group
    last = saver.poll()
    saver.close()
    return {"error": error, "outcome": outcome, "again": again, "last": last, "renewed": renewed}


@pytest.mark.parametrize("bad_rank", [0, 1])
def test_failure_is_told_and_the_next_save_works(pool: Pools, tmp_path: Path, bad_rank: int) -> None:
    first, second = pool(2).run(_fails_once, str(tmp_path), bad_rank)
    assert "No space left on device" in first["error"] and f"rank {bad_rank}" in first["error"]
    assert second["error"] == first["error"], "every rank must learn of it"
    assert "No space left" in first["outcome"].problem and first["again"] is None and second["outcome"] is None
    assert first["last"].step == 2 and not first["last"].problem
    assert first["renewed"] and second["renewed"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-2"], "nothing half-written is left or published"


def _publishing_fails(world: DistEnv, folder: str) -> tuple[str, list[str]]:
    """Rank 0 alone fails, after all ranks have written."""
    model, optimizer, _ = build_tiny(world, RUN)
    saver = Checkpointer(CheckpointPlan(enable=True, folder=folder, async_mode="async"), world, PRINTS)

    def broken(*_: Any) -> Path:
        raise OSError(30, "Read-only file system")

    saver._publish = broken  # type: ignore[method-assign]
    saver.save(1, model, optimizer, {})
    said = ""
    try:
        saver.wait()
    except CheckpointError as failure:
        said = str(failure)
    finally:
        saver.close()
    world.broadcast(None)  # rank 0 has deleted what there was
    return said, [path.name for path in Path(folder).iterdir()]


def test_failure_of_rank_0_alone_reaches_all(pool: Pools, tmp_path: Path) -> None:
    found = pool(2).run(_publishing_fails, str(tmp_path))
    assert found[0] == found[1] and "Read-only file system" in found[0][0]
    assert found[0][1] == []


def _two_at_once(world: DistEnv, folder: str) -> list[tuple[int, bool]]:
    """Saves at once after each other: each begins when the one before is published."""
    model, optimizer, _ = build_tiny(world, RUN)
    saver = Checkpointer(CheckpointPlan(enable=True, folder=folder, async_mode="async"), world, PRINTS)
    real = checkpointer.dcp.save
    running: list[int] = []
    most: list[int] = []

    def slow(*args: Any, **kwargs: Any) -> Any:
        running.append(1)
        most.append(len(running))
        time.sleep(0.3)
        try:
            return real(*args, **kwargs)
        finally:
            running.pop()

    checkpointer.dcp.save = slow  # type: ignore[assignment]
    seen = []
    try:
        for step in (1, 2, 3):
            saver.save(step, model, optimizer, {})
            dist.barrier()
            seen.append((step, find(Path(folder))[0] is not None and steps_in(Path(folder))[-1] == step - 1))
            dist.barrier()
        saver.wait()
    finally:
        checkpointer.dcp.save = real
        saver.close()
    assert max(most) == 1
    return seen


def test_never_two_in_flight(pool: Pools, tmp_path: Path) -> None:
    seen = pool(2).run(_two_at_once, str(tmp_path))[0]
    assert seen == [(1, False), (2, True), (3, True)]
    assert steps_in(tmp_path) == [1, 2, 3]


def _group_timeouts(world: DistEnv, folder: str, mode: Any) -> list[float]:
    """Seconds that groups wait after the first step has lowered timeouts: a save's, and the default one."""
    from torch.distributed.distributed_c10d import _get_default_group

    model, optimizer, _ = build_tiny(world, RUN)
    saver = Checkpointer(CheckpointPlan(enable=True, folder=folder, async_mode=mode), world, PRINTS)
    used: list[dist.ProcessGroup] = []
    real = checkpointer.dcp.save

    def save(*args: Any, process_group: dist.ProcessGroup, **kwargs: Any) -> Any:
        used.append(process_group)
        return real(*args, process_group=process_group, **kwargs)

    checkpointer.dcp.save = save  # type: ignore[assignment]
    set_timeouts(77)
    try:
        saver.save(1, model, optimizer, {})
        saver.wait()
        groups = [group._get_backend(torch.device("cpu")) for group in (*used, _get_default_group())]
        return [group.options._timeout.total_seconds() for group in groups]
    finally:
        checkpointer.dcp.save = real
        set_timeouts(120)
        saver.close()


@pytest.mark.parametrize(("mode", "seconds"), [("async", 7200.0), ("disabled", 1800.0)])
def test_a_slow_disk_is_not_taken_for_a_stuck_rank(pool: Pools, tmp_path: Path, mode: str, seconds: float) -> None:
    assert pool(2).run(_group_timeouts, str(tmp_path), mode) == [[seconds, 77.0]] * 2


_KILLED = """
import sys, time
import titanlite.checkpoint.checkpointer as checkpointer
from titanlite.checkpoint.storage import HashingWriter
real = HashingWriter.finish
def stuck(self, metadata, results):
    print("all is written", flush=True)
    time.sleep(60)
HashingWriter.finish = stuck
import titanlite.main
sys.exit(titanlite.main.run(sys.argv[1:]))
"""


@pytest.mark.slow
def test_killed_while_writing_leaves_nothing_that_loads(tmp_path: Path) -> None:
    from tests.training.test_run import TINY

    flags = ["--job.config_file=debug_model.toml", *TINY, f"--job.dump_folder={tmp_path}", "--training.steps=50"]
    flags += ["--checkpoint.interval=2", "--checkpoint.async_mode=async"]
    process = subprocess.Popen(
        [sys.executable, "-c", _KILLED, *flags],
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
    )
    assert process.stdout is not None
    assert any("all is written" in line for line in process.stdout)
    process.send_signal(signal.SIGKILL)
    process.wait()
    partial, lock = sorted((tmp_path / "checkpoint").iterdir())
    assert lock.name == "run.lock", "the next start takes it over"
    assert partial.name.startswith(".partial-step-2-") and (partial / "__0_0.distcp").stat().st_size > 100_000
    assert find(tmp_path / "checkpoint") == (None, [])
