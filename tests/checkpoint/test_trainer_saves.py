"""Saves of whole runs: in the background, failing, with retention; and what the config makes of the keys."""

from __future__ import annotations

import json
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.checkpoint.staging import DefaultStager

from tests.checkpoint.runs import flip
from tests.pool import Pools
from tests.training.test_run import TINY, _losses, _run
from titanlite.checkpoint import checkpointer
from titanlite.checkpoint.contents import Contents, compare
from titanlite.config.load import load
from titanlite.config.not_implemented import refused, without_effect
from titanlite.parallel.dist_env import DistEnv

ASYNC = ["--training.steps=6", "--checkpoint.interval=2", "--checkpoint.async_mode=async"]


def _one_failing(world: DistEnv, folder: str, *flags: str) -> dict[str, Any]:
    """A run whose save of step 2 fails on rank 1."""
    real = checkpointer.HashingWriter

    class Full(real):  # type: ignore[misc,valid-type]
        def write_data(self, *args: Any) -> Any:
            if world.rank == 1 and "step-2-" in str(self.path):
                raise OSError(28, "No space left on device")
            return super().write_data(*args)

    checkpointer.HashingWriter = Full  # type: ignore[misc]
    try:
        return _run(world, folder, *flags)
    finally:
        checkpointer.HashingWriter = real  # type: ignore[misc]


@pytest.mark.soak
def test_run_with_background_saves_equals_one_without(pool: Pools, tmp_path: Path) -> None:
    there = pool(2).run(_run, str(tmp_path / "sync"), *ASYNC[:2])[0]
    here = pool(2).run(_run, str(tmp_path / "async"), *ASYNC)[0]
    assert _losses(here["rows"]) == _losses(there["rows"])
    for step in (2, 4, 6):
        sides = [Contents(tmp_path / kind / "checkpoint" / f"step-{step}") for kind in ("sync", "async")]
        assert not any(one.elements for one in compare(*sides))
        states = [side.manifest.train for side in sides]
        assert states[0]["resume"].pop("id") != states[1]["resume"].pop("id"), "each save has an id of its own"
        assert states[0] == states[1], "the place in the text is that of the copy"
        told = [line for line in here["said"] if line.startswith(f"checkpoint of step {step} written to")]
        assert len(told) == 1
    longer = pool(2).run(_run, str(tmp_path / "async"), "--training.steps=8", *ASYNC[1:])[0]
    assert any("resumed from step 6" in line for line in longer["said"]) and longer["step"] == 8


def _late_copies(world: DistEnv, folder: str, *flags: str) -> dict[str, Any]:
    """A run whose copies for a save begin late: by then, a loop that does not wait for them has new weights."""
    real = DefaultStager.stage
    DefaultStager.stage = lambda *args: (time.sleep(0.7), real(*args))[1]  # type: ignore[method-assign]
    try:
        return _run(world, folder, *flags)
    finally:
        DefaultStager.stage = real  # type: ignore[method-assign]


@pytest.mark.slow
def test_a_run_waits_for_overlapped_copies_before_it_updates(pool: Pools, tmp_path: Path) -> None:
    pool(2).run(_run, str(tmp_path / "sync"), *ASYNC[:2])
    pool(2).run(_late_copies, str(tmp_path / "late"), *ASYNC[:2], "--checkpoint.async_mode=async_with_pinned_mem")
    for step in (2, 4, 6):
        sides = [Contents(tmp_path / kind / "checkpoint" / f"step-{step}") for kind in ("sync", "late")]
        assert not any(one.elements for one in compare(*sides))


@pytest.mark.parametrize("mode", ["disabled", "async"])
def test_failed_save_is_told_and_the_next_one_succeeds(pool: Pools, tmp_path: Path, mode: str) -> None:
    result = pool(2).run(_one_failing, str(tmp_path), *ASYNC[:2], f"--checkpoint.async_mode={mode}")[0]
    (told,) = [line for line in result["said"] if "NO CHECKPOINT WAS WRITTEN" in line]
    assert told.startswith("step 2: ") and "No space left on device" in told and "rank 1" in told
    assert sorted(path.name for path in (tmp_path / "checkpoint").iterdir()) == ["step-4", "step-6"]


def test_retention_of_a_whole_run(pool: Pools, tmp_path: Path) -> None:
    pool(2).run(_run, str(tmp_path), *ASYNC, "--checkpoint.keep_latest_k=1", "--checkpoint.keep_every=4")
    assert sorted(path.name for path in (tmp_path / "checkpoint").iterdir()) == ["step-4", "step-6"]
    manifest = json.loads((tmp_path / "checkpoint" / "step-6" / "manifest.json").read_text())
    assert "keep_every = 4" in manifest["config"]["toml"]


def test_keys_reach_the_plan() -> None:
    on = "--checkpoint.enable_checkpoint"
    flags = [on, "--checkpoint.keep_latest_k=2", "--checkpoint.keep_every=5", "--checkpoint.async_mode=async"]
    config = load([*flags, "--checkpoint.verify=size"])
    plan = resolve(config, world_size=1).checkpoint
    assert (plan.keep_latest_k, plan.keep_every, plan.async_mode, plan.verify) == (2, 5, "async", "size")
    assert refused(config) == [] and without_effect(config) == []
    assert resolve(load([on]), world_size=1).checkpoint.verify == "hash"
    assert without_effect(load([on, "--checkpoint.keep_every=5"])) == ["checkpoint.keep_every"]


def _scalars(folder: Path) -> dict[str, list[int]]:
    """Steps by tag, as TensorBoard shows them."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    (dated,) = folder.iterdir()
    events = EventAccumulator(str(dated))
    events.Reload()
    return {tag: [event.step for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


@pytest.mark.slow
def test_after_falling_back_no_step_is_recorded_twice(pool: Pools, tmp_path: Path) -> None:
    """Past two damaged checkpoints, and again when the attempt that went on from there is lost as well."""
    flags = ["--training.steps=8", "--checkpoint.interval=2", "--validation.freq=2", "--metrics.enable_tensorboard"]
    whole = pool(2).run(_run, str(tmp_path), *flags)[0]["rows"]
    for steps in ((6, 8), (4, 6, 8)):
        for step in steps:
            flip(next((tmp_path / "checkpoint" / f"step-{step}").glob("*.distcp")))
        found = pool(2).run(_run, str(tmp_path), *flags)[0]
        assert any(f"resumed from step {steps[0] - 2}" in line for line in found["said"])
        assert sum("passed over" in line for line in found["said"]) == len(steps)
        rows = [(row["step"], "validation_loss" in row) for row in found["rows"]]
        assert sorted(rows) == sorted({*rows}) == sorted((row["step"], "validation_loss" in row) for row in whole)
        assert _losses(found["rows"]) == _losses(whole)
        shown = _scalars(tmp_path / "tb")
        assert shown["loss_metrics/global_avg_loss"] == [*range(1, 9)]
        assert shown["validation_metrics/loss"] == [2, 4, 6, 8]


@pytest.mark.slow
def test_a_validation_that_was_owed_is_recorded_once(pool: Pools, tmp_path: Path) -> None:
    flags = ["--training.steps=4", "--checkpoint.interval=2", "--validation.freq=2"]
    pool(1).run(_owing, str(tmp_path), *flags)
    for _ in range(2):  # the attempt that did it is lost, and the next one does it again
        shutil.rmtree(tmp_path / "checkpoint" / "step-4", ignore_errors=True)
        found = pool(1).run(_run, str(tmp_path), *flags)[0]
        assert [row["step"] for row in found["rows"] if "validation_loss" in row] == [2, 4]
        assert any("validation at 2" in line for line in found["said"])


def _owing(world: DistEnv, folder: str, *flags: str) -> None:
    """A run that is asked to stop in its first validation."""
    from titanlite.build import build
    from titanlite.config.load import load_file
    from titanlite.signals import StopRequested, StopSignal
    from titanlite.trainer import Trainer

    plans = resolve_plans(load_file("debug_model.toml", [*TINY, f"--job.dump_folder={folder}", *flags]), world.size)
    stop = StopSignal()
    trainer = Trainer(build(plans, world), stop)
    validate = trainer.validate

    def asked() -> None:
        if trainer.step == 2:
            trainer.stopping = True
        validate()

    trainer.validate = asked  # type: ignore[method-assign]
    with pytest.raises(StopRequested):
        trainer.train()
