"""Saves that are written while training goes on: their content, how they fail, and how long they
wait.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_group
from torch.distributed.tensor._dispatch import OpDispatcher

from tests.support.checkpoints import PRINTS, RUN, names, options
from tests.support.harness import build_tiny, full, stepper
from titanlite.checkpoint import manager
from titanlite.checkpoint.manager import Checkpointer
from titanlite.checkpoint.manifest import CheckpointError, steps_in
from titanlite.cli.hub.compare_checkpoints import Contents
from titanlite.dist.dist_env import DistEnv
from titanlite.metrics.timeouts import set_timeouts

REAL_SAVE = manager.dcp.save


@contextlib.contextmanager
def _saver(
    world: DistEnv, folder: Path, mode: str = "async", *built: Any
) -> Iterator[tuple[Checkpointer, Any, Any]]:
    """A checkpointer, a model and its optimizer, new ones if none were built."""
    model, optimizer, *_ = built or build_tiny(world, RUN)
    saver = Checkpointer(options(folder, async_mode=mode), world, PRINTS)
    try:
        yield saver, model, optimizer
    finally:
        saver.close()


def _copy_beside_the_next_step(world: DistEnv, folder: Path) -> dict[str, Any]:
    """Hold the copy back: which work goes on meanwhile, which does not, the weights that were to be
    saved, and operators of DTensor in another thread.

    The loop itself never waits for a copy. torch 2.13 has references to Python objects with such an
    operator, and releases them unguarded.
    """
    held = threading.Event()
    seen: dict[str, Any] = {"elsewhere": []}
    real = OpDispatcher._propagate_op_sharding_dispatch_slow_path

    # A new thread knows no operator yet, so each comes by here.
    def propagate(self: OpDispatcher, operator: Any, *args: Any) -> Any:
        if threading.current_thread() is not threading.main_thread():
            seen["elsewhere"].append(str(operator))
        return real(self, operator, *args)

    model, optimizer, take = stepper(world, RUN)
    with (
        _saver(world, folder, "async", model, optimizer) as (saver, *_),
        patch.object(OpDispatcher, real.__name__, propagate),
    ):
        stager = saver._async._stager
        stage = stager.stage
        stager.stage = lambda tensors: (held.wait(300), stage(tensors))[1]  # type: ignore[method-assign]

        def before_update() -> None:
            seen["held back"] = not held.is_set()  # forward and backward are done
            threading.Timer(0.5, held.set).start()

        def after_update() -> None:
            seen["awaited"] = held.is_set()

        take(1, 0.1)
        before = {name: full(p).clone() for name, p in model.named_parameters()}
        saver.save(1, model, optimizer, {})
        take(2, 0.1, 1, before_update=before_update, after_update=after_update)
        saver.wait()
        moved = any(not torch.equal(full(p), before[name]) for name, p in model.named_parameters())
    return {**seen, "moved": moved, "before": before}


def test_the_copy_is_made_beside_forward_and_backward_and_awaited_before_the_update(pool, tmp_path):
    found = pool(2).run(_copy_beside_the_next_step, tmp_path)
    for one in found:
        assert one["held back"] and one["awaited"] and one["moved"]
        assert one["elsewhere"] == []
    contents = Contents(tmp_path / "step-1")
    for name, weight in found[0]["before"].items():
        assert torch.equal(contents.read(f"model.{name}"), weight)


def _failing(world: DistEnv, folder: Path, part: str, bad_rank: int) -> dict[str, Any]:
    """A save that fails in one part, and one that works."""
    mode = "async_with_pinned_mem" if part == "copy" else "async"
    with _saver(world, folder, mode) as (saver, model, optimizer):
        places = {
            "check": (torch, "stack"),
            "copy": (saver._async._stager, "stage"),
            "write": (manager.HashingWriter, "write_data"),
        }
        owner, name = places.get(part, (saver, "_publish"))
        real = getattr(owner, name)
        error = ""

        def full_disk(*args: Any) -> Any:
            if world.rank == bad_rank:
                raise OSError(28, "No space left on device")
            return real(*args)

        with patch.object(owner, name, full_disk):
            saver.save(1, model, optimizer, {})
            saver.await_copy()  # not for ever
            try:
                saver.wait()
            except CheckpointError as failure:
                error = str(failure)
        outcomes = [saver.poll(), saver.poll()]
        saver.save(2, model, optimizer, {})
        saver.wait()
        world.broadcast(None)
        return {"error": error, "outcomes": [*outcomes, saver.poll()]}


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(
    ("part", "rank"), [("write", 1), ("publish", 0), ("check", 1), ("copy", 1)]
)
def test_a_failure_reaches_all_ranks_and_the_next_save_works(pool, tmp_path, part, rank):
    here, there = pool(2).run(_failing, tmp_path, part, rank)
    assert here["error"] == there["error"], "every rank must learn of it"
    assert "No space left on device" in here["error"]
    assert part != "write" or f"rank {rank}" in here["error"]
    failed, none, last = here["outcomes"]
    assert "No space left" in failed.problem
    assert none is None
    assert (last.step, last.problem) == (2, "")
    assert there["outcomes"] == [None] * 3, "told on rank 0"
    assert names(tmp_path) == ["step-2"], "nothing half-written is left or published"


def _saves_in_a_row(world: DistEnv, folder: Path) -> tuple[int, list[float]]:
    """Three slow saves at once, after the first step has lowered timeouts.

    Returns how many were being written together at most, and the timeouts of the default group and
    of a save's.
    """
    running: list[int] = []
    most = 0
    used = [_get_default_group()]

    def slow(*args: Any, process_group: dist.ProcessGroup, **kwargs: Any) -> Any:
        nonlocal most
        running.append(1)
        most = max(most, len(running))
        used.append(process_group)
        time.sleep(0.3)
        REAL_SAVE(*args, process_group=process_group, **kwargs)
        running.pop()

    with (
        _saver(world, folder) as (saver, model, optimizer),
        patch.object(manager.dcp, "save", slow),
    ):
        set_timeouts(77)
        try:
            for step in (1, 2, 3):
                saver.save(step, model, optimizer, {})
            saver.wait()
            groups = [group._get_backend(torch.device("cpu")) for group in used[:2]]
            return most, [group.options._timeout.total_seconds() for group in groups]
        finally:
            set_timeouts(300)


@pytest.mark.slow
def test_never_two_in_flight_and_a_slow_disk_is_not_taken_for_a_stuck_rank(pool, tmp_path):
    assert pool(2).run(_saves_in_a_row, tmp_path) == [(1, [77.0, 7200.0])] * 2
    assert steps_in(tmp_path) == [1, 2, 3]
