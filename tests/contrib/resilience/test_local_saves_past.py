"""Local saves: what must not come back, and what goes wrong around them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from threading import Event
from types import SimpleNamespace
from typing import Any
from unittest.mock import create_autospec, patch

import pytest
import torch

from tests.support.checkpoints import PRINTS, RUN, options
from tests.support.harness import Run, stepper
from tests.support.local_saves import part_of, parts_of, refused, same_end, straight, train_both
from tests.support.pool import Pools
from titanlite.checkpoint.dcp_files import HashingWriter
from titanlite.checkpoint.manager import Checkpointer
from titanlite.contrib.resilience import manager
from titanlite.contrib.resilience.folder import Past, write_past
from titanlite.contrib.resilience.manager import LocalSchedule, TieredCheckpointer
from titanlite.dist.dist_env import DistEnv
from titanlite.trainer import Trainer


@pytest.mark.slow
def test_a_whole_save_of_an_abandoned_past_on_nodes_that_were_away_never_comes_back(
    pool: Pools, tmp_path: Path
) -> None:
    pool(2).run(train_both, RUN, tmp_path, 7, [0, 1], local_copies=1)
    # On other nodes it goes on from step 4, and is stopped earlier.
    pool(2).run(train_both, RUN, tmp_path, 6, [2, 3], 4, local_copies=1)
    shutil.rmtree(tmp_path / "node-2")
    shutil.rmtree(tmp_path / "node-3")
    found = pool(2).run(train_both, RUN, tmp_path, 5, [0, 1], 4, local_copies=1)
    said = [line for line in found[0]["notices"] if "step 7" in line]
    assert any("later the run went on without it" in line for line in said)


@pytest.mark.slow
def test_a_process_that_outlived_its_run_writes_nothing_that_comes_back(
    pool: Pools, tmp_path: Path
) -> None:
    pool(2).run(_train_beside_a_later_start, RUN, tmp_path)
    assert parts_of(tmp_path, 0, 0, 7)
    pool(2).run(train_both, RUN, tmp_path, 5, [0, 1], 4)


def _train_beside_a_later_start(world: DistEnv, run: Run, folder: Path) -> None:
    """Steps to 7; at step 6 the run begins on other nodes too, from step 4."""
    real = TieredCheckpointer.save_local
    shared = folder / "shared"

    def save_local(saver: TieredCheckpointer, step: int, *more: Any) -> None:
        if step == 6 and world.rank == 0:
            write_past(shared, Past("another", (), 4))
        real(saver, step, *more)

    with patch.object(TieredCheckpointer, "save_local", save_local):
        train_both(world, run, folder, 7, [0, 1])


@pytest.mark.slow
def test_a_run_that_went_on_without_local_saves_never_gets_old_ones_back(
    pool: Pools, tmp_path: Path
) -> None:
    pool(2).run(train_both, RUN, tmp_path, 7, [0, 1])
    pool(2).run(_start_without_local_saves, RUN, tmp_path)
    found = pool(2).run(train_both, RUN, tmp_path, 5, [0, 1], 4)[0]
    assert any("later the run went on without it" in line for line in found["notices"])


def _start_without_local_saves(world: DistEnv, run: Run, folder: Path) -> None:
    """Resume from the shared checkpoint alone, and save nothing."""
    model, optimizer, _ = stepper(world, run, loss_function=run.builder(world).loss())
    saver = Checkpointer(options(folder / "shared"), world, PRINTS)
    assert saver.load(model, optimizer) is not None
    saver.close()


@pytest.mark.slow
def test_a_deleted_shared_checkpoint_takes_local_saves_with_it(pool: Pools, tmp_path: Path) -> None:
    pool(2).run(train_both, RUN, tmp_path, 9, [0, 1])
    shutil.rmtree(tmp_path / "shared" / "step-8")
    found = pool(2).run(train_both, RUN, tmp_path, 5, [0, 1], 4)[0]
    said = [line for line in found["notices"] if "the shared checkpoint of step 8, which" in line]
    assert said[0].endswith("is gone")
    pool(2).run(train_both, RUN, tmp_path, 6, [0, 1], 5)


@pytest.mark.slow
def test_a_shared_checkpoint_that_is_damaged_takes_none_with_it(
    pool: Pools, tmp_path: Path
) -> None:
    pool(2).run(train_both, RUN, tmp_path, 9, [0, 1])
    step = tmp_path / "shared" / "step-8"
    step.rename(step.with_name("step-8.invalid-0"))
    pool(2).run(train_both, RUN, tmp_path, 9, [0, 1], 9)


def test_a_local_save_of_a_later_titanlite_is_refused_and_stays(
    pool: Pools, tmp_path: Path
) -> None:
    pool(2).run(train_both, RUN, tmp_path, 3, [0, 1])
    manifest = part_of(tmp_path, 1, 1, 3).parent / "manifest.json"
    later = json.dumps({**json.loads(manifest.read_bytes()), "format": 99})
    manifest.write_text(later)
    text = pool(2).run(refused, RUN, tmp_path, 4, [0, 1])[0]
    assert "has format 99" in text
    assert manifest.read_text() == later


@pytest.mark.slow
def test_local_saves_go_on_while_a_shared_one_is_being_written(pool: Pools, tmp_path: Path) -> None:
    found = pool(2).run(_train_with_a_slow_store, RUN, tmp_path)
    same_end(found, straight(pool, RUN, tmp_path, 2, 7))
    assert found[0]["beside"] == [5, 6, 7]
    assert (tmp_path / "shared" / "step-4").is_dir()
    found = pool(2).run(train_both, RUN, tmp_path, 8, [0, 1], 7)
    same_end(found, straight(pool, RUN, tmp_path / "more", 2, 8))


def _train_with_a_slow_store(world: DistEnv, run: Run, folder: Path) -> dict[str, Any]:
    """Steps to 7; the shared save of step 4 ends after the local one of step 7."""
    real = TieredCheckpointer.save_local
    write_index = HashingWriter.finish
    go_on = Event()
    beside = []

    def finish(*arguments: Any, **more: Any) -> None:
        go_on.wait()
        write_index(*arguments, **more)

    def save_local(saver: TieredCheckpointer, step: int, *more: Any) -> None:
        real(saver, step, *more)
        if saver._async.in_flight:
            saver.wait_for_local()
            beside.append(step)
        if step == 7:
            go_on.set()

    with (
        patch.object(TieredCheckpointer, "save_local", save_local),
        patch.object(HashingWriter, "finish", finish),
    ):
        found = train_both(world, run, folder, 7, [0, 1], async_mode="async", local_copies=1)
    return {**found, "beside": beside}


def test_a_save_is_proven_by_a_good_step_since_the_latest_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(manager, "train_state", lambda trainer: {})
    world = DistEnv(0, 0, 1, torch.device("cpu"))
    schedule = LocalSchedule(options(tmp_path, local_interval=1), world)
    saver = create_autospec(TieredCheckpointer, instance=True)
    trainer = create_autospec(Trainer, instance=True)
    trainer.parts = SimpleNamespace(checkpointer=saver, model=None, optimizer=None)
    proven = []
    # Step 3 was skipped; the shared save of step 5 is the latest of step 6.
    for step, good in ((1, 1), (2, 2), (3, 2), (4, 3), (6, 1)):
        if step == 6:
            schedule.begin(5)
        trainer.step, trainer.good_steps = step, good
        schedule.between(trainer)
        proven.append(saver.save_local.call_args.kwargs["proven"])
    assert proven == [True, True, False, True, True]


def test_unproven_saves_delete_nothing_and_a_proven_one_leaves_two(
    pool: Pools, tmp_path: Path
) -> None:
    left = pool(2).run(_save_without_proof, RUN, tmp_path)[0]
    assert left == [["step-1", "step-2", "step-3", "step-4"], ["step-4", "step-5"]]


def _save_without_proof(world: DistEnv, run: Run, folder: Path) -> list[list[str]]:
    """Save four times without proof, then with; return what lay there before and after the last."""
    model, optimizer, _ = stepper(world, run, loss_function=run.builder(world).loss())
    local = folder / f"node-{world.rank}"
    section = options(folder / "shared", local_folder=str(local), local_interval=1)
    saver = TieredCheckpointer(section, world, PRINTS)
    found = []
    try:
        for step in range(1, 6):
            saver.save_local(step, model, optimizer, {}, proven=step == 5)
            if step >= 4:
                found.append(sorted(path.name for path in saver.local.step(0).parent.iterdir()))
    finally:
        saver.close()
    return found
