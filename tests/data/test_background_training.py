"""The trainer with batches prepared by a thread: the same run, and no thread after it."""

from __future__ import annotations

import shutil
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from tests.support.pool import Pools
from tests.support.steps import train_rows
from tests.support.tiny import EIGHT_STEPS
from titanlite.assembly.build import build
from titanlite.checkpoint import manager
from titanlite.data.prefetch import THREAD
from titanlite.dist.dist_env import DistEnv
from titanlite.dist.signals import StopRequested
from titanlite.resolve.load import load_config
from titanlite.trainer import Trainer

TINY = [
    *EIGHT_STEPS,
    "--validation.enable",
    "--validation.freq=4",
    "--validation.steps=3",
    "--validation.batch_size=2",
    "--validation.seq_len=16",
    "--checkpoint.enable_checkpoint",
    "--checkpoint.interval=3",
]


def _run(world: DistEnv, folder: str, *flags: str) -> dict[tuple[int, str], float]:
    """Train; return the losses by step and name."""
    rows = train_rows(world, folder, *TINY, *flags)
    assert not any(thread.name.startswith(THREAD) for thread in threading.enumerate())
    return {(row["step"], key): row[key] for row in rows for key in row if "loss" in key}


def _stopped(world: DistEnv, folder: str, *flags: str) -> dict[str, Any]:
    """Ask rank 1 to stop in step 5, while the save of step 3 is being written and prepared steps
    are in stock.
    """
    trainer = Trainer(build(load_config("debug_model.toml", world.size, [*TINY, *flags]), world))
    released = threading.Event()
    save = manager.dcp.save
    fetch = trainer.fetch
    seen = {}

    def slow_save(*arguments: Any, **more: Any) -> Any:
        assert released.wait(300)
        return save(*arguments, **more)

    def ask() -> Any:
        batches = fetch()
        if trainer.step == 5:
            producer: Any = trainer.parts.loader
            deadline = time.monotonic() + 300
            while (
                not (stock := sum(item.done() for item in producer._ahead.items))
                and time.monotonic() < deadline
            ):
                time.sleep(0.01)
            assert trainer.parts.checkpointer is not None
            seen.update(stock=stock, in_flight=trainer.parts.checkpointer._async.in_flight)
            if world.rank == 1:
                trainer.stop.request("the test")
            threading.Timer(0.3, released.set).start()
        return batches

    manager.dcp.save, trainer.fetch = slow_save, ask  # type: ignore[assignment, method-assign]
    try:
        trainer.train()
    except StopRequested:
        seen["stopped"] = trainer.step
    finally:
        manager.dcp.save = save
    return seen


@pytest.mark.slow
def test_a_stop_with_a_save_and_steps_under_way_is_resumed_bit_for_bit(
    pool: Pools, tmp_path: Path
) -> None:
    """From the checkpoint of the stop, and from the one that was being written: neither counts
    steps in stock.
    """
    straight = pool(2).run(
        _run, str(tmp_path / "straight"), "--training.steps=8", "--data.prefetch=0"
    )[0]
    assert len(straight) >= 8 + 2
    flags = [
        "--training.steps=8",
        "--data.prefetch=3",
        "--checkpoint.async_mode=async_with_pinned_mem",
    ]
    for seen in pool(2).run(
        _stopped, str(tmp_path), *flags, f"--job.dump_folder={tmp_path / 'stop'}"
    ):
        assert seen["stock"] > 0
        assert seen["in_flight"]
        assert seen["stopped"] in (5, 6)
    shutil.copytree(tmp_path / "stop", tmp_path / "pending")
    for step in (5, 6):
        shutil.rmtree(tmp_path / "pending" / "checkpoint" / f"step-{step}", ignore_errors=True)
    for name in ("stop", "pending"):
        assert pool(2).run(_run, str(tmp_path / name), *flags)[0] == straight, name
