"""Whole runs of the trainer that save weights alone, and that begin from a seed."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from tests.support.checkpoints import unequal
from tests.support.pool import Pools
from tests.support.run_folders import strict_lines
from tests.support.whole_runs import losses_of, make_trainer, train_run
from titanlite.checkpoint.manifest import CheckpointError, read_manifest, steps_in
from titanlite.checkpoint.resume import save_seed
from titanlite.cli.hub.compare_checkpoints import Contents
from titanlite.data.loader import TrainLoader
from titanlite.dist.dist_env import DistEnv

SEED = "--checkpoint.create_seed_checkpoint"


def _said(found: dict[str, Any], start: str) -> str:
    (line,) = [line for line in found["said"] if line.startswith(start)]
    return str(line)


@pytest.mark.slow
def test_last_save_holds_weights_only(pool, tmp_path):
    flags = ["--training.steps=4", "--checkpoint.interval=2", "--checkpoint.async_mode=async"]
    pool(2).run(train_run, str(tmp_path / "full"), *flags)
    only = [
        "--checkpoint.model_weights_only",
        "--checkpoint.export_dtype=bfloat16",
        "--checkpoint.keep_latest_k=1",
    ]
    found = pool(2).run(train_run, str(tmp_path / "only"), *flags, *only)[0]
    assert "bfloat16" in _said(found, "the last save, of step 4, will hold the weights only")
    full, last = (Contents(tmp_path / kind / "checkpoint" / "step-4") for kind in ("full", "only"))
    assert last.manifest.weights_only
    assert last.manifest.dtype == "bfloat16"
    weights = [name for name in full.manifest.tensors if name.startswith("model.")]
    assert sorted(last.manifest.tensors) == sorted(weights)
    assert all(torch.equal(full.read(name).to(torch.bfloat16), last.read(name)) for name in weights)
    assert last.manifest.size < full.manifest.size / 4
    root = tmp_path / "only" / "checkpoint"
    assert not read_manifest(root / "step-2").weights_only, "it can still be resumed"
    error = pool(2).run(train_run, str(tmp_path / "only"), *flags, "--training.steps=6")[0]["error"]
    assert "step-4 holds weights only" in error
    assert "checkpoint.initial_load_path" in error
    start = ["--training.steps=1", "--optimizer.lr=0"]
    start += [f"--checkpoint.initial_load_path={root}/step-4", "--optimizer.weight_decay=0"]
    found = pool(2).run(train_run, str(tmp_path / "next"), *start)[0]
    assert any("are converted" in line for line in found["said"])
    begun = Contents(tmp_path / "next" / "checkpoint" / "step-1")
    assert all(torch.equal(begun.read(name), last.read(name).float()) for name in weights)
    shutil.move(root / "step-4", tmp_path / "step-4")
    assert pool(2).run(train_run, str(tmp_path / "only"), *flags)[0]["step"] == 4
    assert unequal(root / "step-4", tmp_path / "full" / "checkpoint" / "step-4") == []


def test_a_run_that_has_ended_stays_as_it_is_when_the_last_save_gets_another_form(pool, tmp_path):
    flags = ["--training.steps=2", "--no-validation.enable"]
    pool(1).run(train_run, str(tmp_path), *flags)
    flags += ["--checkpoint.model_weights_only", "--checkpoint.last_save_in_hf"]
    found = pool(1).run(train_run, str(tmp_path), *flags)[0]
    assert "raise training.steps" in _said(found, "nothing to do")
    assert steps_in(tmp_path / "checkpoint") == [2]
    assert not (tmp_path / "checkpoint" / "step-2-hf").exists()


def _seed(world: DistEnv, folder: Path, *flags: str) -> str:
    try:
        save_seed(make_trainer(world, str(folder), *flags).parts)
    except CheckpointError as error:
        return str(error)
    return ""


PP = "--experimental.pipeline_parallel_degree=2"


@pytest.mark.parametrize(
    ("ranks", "degrees"), [(1, []), pytest.param(4, [PP], marks=pytest.mark.soak)]
)
def test_a_run_from_the_seed_is_a_fresh_run_bit_for_bit(pool, tmp_path, ranks, degrees):
    seeded = tmp_path / "seeded"
    fresh = tmp_path / "fresh"
    flags = ["--training.steps=3", "--training.batch_size=2", *degrees]
    root = seeded / "checkpoint"
    assert pool(1).run(_seed, seeded, *flags, SEED) == [""]
    assert steps_in(root) == [0]
    assert not (seeded / "metrics.jsonl").exists()
    assert "holds step-0 already" in pool(1).run(_seed, seeded, *flags, SEED)[0]
    here = pool(ranks).run(train_run, str(seeded), *flags)[0]
    there = pool(ranks).run(train_run, str(fresh), *flags)[0]
    assert _said(here, "resumed from step 0")
    losses = losses_of(here["rows"])
    assert losses == losses_of(there["rows"])
    assert sorted(losses) == [1, 2, 3]
    sides = root / "step-3", fresh / "checkpoint" / "step-3"
    assert unequal(*sides) == []
    left, right = (read_manifest(side).train for side in sides)
    for key in ("data", "tokens_seen", "global_batch"):
        assert left[key] == right[key]


@pytest.fixture(scope="module")
def left(pool: Pools, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on two ranks that was lost at step 6; its checkpoint is of step 4."""
    folder = tmp_path_factory.mktemp("left")
    pool(2).run(train_run, str(folder), "--training.steps=6", "--checkpoint.interval=4")
    shutil.rmtree(folder / "checkpoint" / "step-6")
    return folder


def _resume(
    pool: Pools, ranks: int, left: Path, folder: Path, *flags: str, function: Any = train_run
) -> dict[str, Any]:
    shutil.copytree(left, folder)
    found: dict[str, Any] = pool(ranks).run(function, str(folder), *flags, "--training.steps=6")[0]
    return found


def test_a_run_that_goes_on_on_other_ranks_is_verified(pool, left, tmp_path):
    assert _said(_resume(pool, 1, left, tmp_path / "run"), "resume verified") == (
        "resume verified at step 4: every file is as it was written; the next batch is the one "
        "that was to come"
    )


def _late(world: DistEnv, folder: str, *flags: str) -> dict[str, Any]:
    """A run whose loader begins one step later than it was told."""
    move = TrainLoader.load_state_dict

    def late(self: TrainLoader, state: dict[str, int]) -> None:
        move(self, {"next_sequence": state["next_sequence"] + 8})

    with patch.object(TrainLoader, "load_state_dict", late):
        return train_run(world, folder, *flags, "--data.prefetch=0")


@pytest.mark.slow
def test_a_skipped_batch_is_found(pool, left, tmp_path):
    found = _resume(pool, 2, left, tmp_path / "run", function=_late)
    line = _said(found, "RESUME NOT VERIFIED at step 4: every file is as it was written;")
    assert line.endswith("the next batch is not the one that was to come then")


@pytest.mark.slow
def test_schedule_and_text_can_begin_anew(pool, left, tmp_path):
    anew = "--checkpoint.exclude_from_loading=lr_scheduler,dataloader"
    found = _resume(pool, 2, left, tmp_path / "run", anew, "--checkpoint.interval=5")
    before = losses_of(strict_lines(left / "metrics.jsonl"))
    now = losses_of(found["rows"])
    assert [now[step][2] for step in (5, 6)] == [before[step][2] for step in (1, 2)]
    assert any("but with new schedule, text" in line for line in found["said"])
    assert _said(found, "resume verified").endswith(
        "the next batch is another one, as allowed: dataloader"
    )
    shutil.rmtree(tmp_path / "run" / "checkpoint" / "step-6")
    again = pool(2).run(train_run, str(tmp_path / "run"), "--training.steps=6", anew)[0]
    assert losses_of(again["rows"])[6] == now[6], "the schedule and the text continue"
    assert _said(again, "resume verified").endswith("the next batch is the one that was to come")
