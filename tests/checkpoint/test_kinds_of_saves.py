"""Whole runs that save by the clock, at milestones, the best, weights alone, or a seed."""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.pool import Pools
from tests.training.test_run import TINY, _losses, _run
from titanlite.build import build
from titanlite.checkpoint.contents import Contents, compare
from titanlite.checkpoint.manifest import CheckpointError, read_manifest, steps_in
from titanlite.checkpoint.schedule import SaveSchedule
from titanlite.config.errors import ConfigError
from titanlite.config.load import load, load_file
from titanlite.config.not_implemented import refused, without_effect
from titanlite.metrics.wandb import ID_FILE
from titanlite.parallel.world import World
from titanlite.prepare import resolve_plans
from titanlite.trainer import Trainer, save_seed

ON = "--checkpoint.enable_checkpoint"


def _steps(folder: Path) -> list[int]:
    return steps_in(folder / "checkpoint")


def _slow(world: DistEnv, folder: str, *flags: str) -> list[tuple[int, float]]:
    """A run whose steps take a quarter of a second: the steps after which it began to save, and when."""
    fetch, begin = Trainer.fetch, SaveSchedule.begin
    begun: list[tuple[int, float]] = []

    def slow(self: Trainer) -> Any:
        time.sleep(0.25)
        return fetch(self)

    def noted(self: SaveSchedule, step: int) -> None:
        begin(self, step)
        begun.append((step, time.monotonic()))

    Trainer.fetch, SaveSchedule.begin = slow, noted  # type: ignore[method-assign]
    try:
        _run(world, folder, *flags)
    finally:
        Trainer.fetch, SaveSchedule.begin = fetch, begin  # type: ignore[method-assign]
    return begun[1:]  # the first is the beginning of the first interval


@pytest.mark.slow
def test_saves_by_the_clock(pool: Pools, tmp_path: Path) -> None:
    flags = ["--training.steps=9", "--checkpoint.interval_type=seconds", "--checkpoint.interval=1"]
    here, there = pool(2).run(_slow, str(tmp_path), *flags)
    assert [step for step, _ in here] == [step for step, _ in there] == _steps(tmp_path)
    *during, (last, _) = here
    assert last == 9 and during
    assert all(later - earlier > 0.99 for (_, earlier), (_, later) in zip(during, during[1:], strict=False))


def test_milestones_and_the_first_step(pool: Pools, tmp_path: Path) -> None:
    flags = ["--training.steps=9", "--checkpoint.interval=7", "--checkpoint.keep_latest_k=2"]
    pool(1).run(_run, str(tmp_path), *flags, "--checkpoint.milestones=powers_of_two")
    assert _steps(tmp_path) == [1, 2, 4, 8, 9]
    other = tmp_path / "list"
    first = "--checkpoint.enable_first_step_checkpoint"
    pool(1).run(_run, str(other), *flags, "--checkpoint.milestones=[3]", first)
    assert _steps(other) == [3, 7, 9], "1 was saved, and went when 7 and 9 had come"
    assert any(
        "checkpoint of step 1 " in line for line in pool(1).run(_run, str(tmp_path / "x"), ON, *BRIEF, first)[0]["said"]
    )


BRIEF = ["--training.steps=2", "--checkpoint.interval=50"]


@pytest.mark.slow
def test_the_best_by_validation_is_saved_and_stays_across_a_restart(pool: Pools, tmp_path: Path) -> None:
    flags = ["--validation.enable", "--validation.freq=2", "--checkpoint.interval=100", "--checkpoint.keep_latest_k=1"]
    flags += ["--checkpoint.keep_best=1", "--optimizer.lr=0.3", "--lr_scheduler.total_steps=12"]
    said = pool(2).run(_run, str(tmp_path), "--training.steps=6", *flags)[0]["said"]
    assert any("every 100 steps, when validation is among the best 1 and at the end" in line for line in said)
    rows = pool(2).run(_run, str(tmp_path), "--training.steps=12", *flags)[0]["rows"]
    losses = {row["step"]: row["validation_loss"] for row in rows if "validation_loss" in row}
    assert sorted(losses) == [2, 4, 6, 8, 10, 12]
    best = min(losses, key=lambda step: losses[step])
    root = tmp_path / "checkpoint"
    assert {best, 12} <= set(steps_in(root)) and len(steps_in(root)) <= 3
    for step in steps_in(root):
        assert read_manifest(root / f"step-{step}").validation_loss == losses[step]


@pytest.mark.parametrize("mode", ["disabled", pytest.param("async", marks=pytest.mark.slow)])
def test_last_save_holds_weights_only(pool: Pools, tmp_path: Path, mode: str) -> None:
    flags = ["--training.steps=4", "--checkpoint.interval=2", f"--checkpoint.async_mode={mode}"]
    pool(2).run(_run, str(tmp_path / "full"), *flags)
    only = ["--checkpoint.model_weights_only", "--checkpoint.export_dtype=bfloat16", "--checkpoint.keep_latest_k=1"]
    said = pool(2).run(_run, str(tmp_path / "only"), *flags, *only)[0]["said"]
    assert any(line.startswith("the last save, of step 4, will hold the weights only, as bfloat16") for line in said)
    full, last = (Contents(tmp_path / kind / "checkpoint" / "step-4") for kind in ("full", "only"))
    assert last.manifest.weights_only and last.manifest.dtype == "bfloat16"
    names = [name for name in full.manifest.tensors if name.startswith("model.")]
    assert sorted(last.manifest.tensors) == sorted(names)
    assert all(torch.equal(full.read(name).to(torch.bfloat16), last.read(name)) for name in names)
    assert last.manifest.size < full.manifest.size / 4
    root = tmp_path / "only" / "checkpoint"
    assert not read_manifest(root / "step-2").weights_only, "what can be resumed is still there"
    for more in ("--training.steps=4", "--training.steps=6"):
        error = pool(2).run(_run, str(tmp_path / "only"), *flags, more)[0]["error"]
        assert "step-4 holds weights only" in error and "checkpoint.initial_load_path" in error
    shutil.move(root / "step-4", tmp_path / "step-4")
    assert pool(2).run(_run, str(tmp_path / "only"), *flags)[0]["step"] == 4
    both = [Contents(tmp_path / kind / "checkpoint" / "step-4") for kind in ("full", "only")]
    assert not any(one.elements or not one.comparable for one in compare(*both))


def _seed(world: DistEnv, folder: str, *flags: str) -> str:
    config = load_file("debug_model.toml", [*TINY, f"--job.dump_folder={folder}", *flags])
    plans = resolve_plans(config, world.size)
    try:
        save_seed(build(plans, world))
    except CheckpointError as error:
        return str(error)
    return ""


PP = "--experimental.pipeline_parallel_degree=2"
TP = "--training.tensor_parallel_degree=2"


@pytest.mark.parametrize(
    ("ranks", "degrees"),
    [
        (1, []),
        pytest.param(2, [], marks=pytest.mark.slow),
        pytest.param(2, [PP], marks=pytest.mark.soak),
        pytest.param(4, [PP], marks=pytest.mark.soak),
        pytest.param(4, [TP], marks=pytest.mark.soak),
    ],
)
def test_a_run_from_the_seed_is_a_fresh_run_bit_for_bit(
    pool: Pools, tmp_path: Path, ranks: int, degrees: list[str]
) -> None:
    seeded, fresh = tmp_path / "seeded", tmp_path / "fresh"
    flags = ["--training.steps=3", "--training.batch_size=2", *degrees]
    create = "--checkpoint.create_seed_checkpoint"
    assert pool(1).run(_seed, str(seeded), *flags, create) == [""]
    assert _steps(seeded) == [0] and not (seeded / "metrics.jsonl").exists()
    assert "holds step-0 already" in pool(1).run(_seed, str(seeded), *flags, create)[0]
    here = pool(ranks).run(_run, str(seeded), *flags)[0]
    there = pool(ranks).run(_run, str(fresh), *flags)[0]
    assert any("resumed from step 0" in line for line in here["said"])
    assert _losses(here["rows"]) == _losses(there["rows"]) and sorted(_losses(here["rows"])) == [1, 2, 3]
    sides = [Contents(folder / "checkpoint" / "step-3") for folder in (seeded, fresh)]
    assert [one.name for one in compare(*sides) if one.elements or not one.comparable] == []
    here_train, there_train = (side.manifest.train for side in sides)
    for key in ("data", "tokens_seen", "global_batch"):
        assert here_train[key] == there_train[key]


def _hurried(world: DistEnv, folder: str, grace: str, *flags: str) -> list[str]:
    os.environ["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"] = grace
    try:
        return list(_run(world, folder, *flags)["said"])
    finally:
        del os.environ["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"]


@pytest.mark.soak
def test_a_save_too_slow_for_the_grace_period_is_told_once(pool: Pools, tmp_path: Path) -> None:
    flags = ["--checkpoint.interval=1"]
    (told,) = [
        line
        for line in pool(2).run(_hurried, str(tmp_path), "0.001", "--training.steps=3", *flags)[0]
        if "after a SIGTERM" in line
    ]
    assert told.startswith("the save of step 1 took ")
    seconds = read_manifest(tmp_path / "checkpoint" / "step-3").seconds
    assert seconds is not None and 0 < seconds < 60
    said = pool(2).run(_hurried, str(tmp_path), "0.001", "--training.steps=4", *flags)[0]
    (told,) = [line for line in said if "after a SIGTERM" in line]
    assert told.startswith("the save of step 4 took ")
    said = pool(2).run(_hurried, str(tmp_path), "3600", "--training.steps=5", *flags)[0]
    assert not any("after a SIGTERM" in line for line in said)


def test_manifest_says_where_it_comes_from(pool: Pools, tmp_path: Path) -> None:
    pool(1).run(_run, str(tmp_path), *BRIEF)
    manifest = read_manifest(tmp_path / "checkpoint" / "step-2")
    assert manifest.environment["OMP_NUM_THREADS"] == "1" and manifest.environment["WORLD_SIZE"] == "1"
    assert manifest.config["model"]["family"] == "llama3" and manifest.config["model"]["dim"] == 64
    assert manifest.trackers == {} and manifest.git


def _tracked(world: DistEnv, folder: str, *flags: str) -> None:
    os.environ.update(WANDB_MODE="offline", WANDB__DISABLE_STATS="true")
    _run(world, folder, *flags, "--metrics.enable_wandb")


@pytest.mark.slow
def test_manifest_names_the_run_at_weights_and_biases(pool: Pools, tmp_path: Path) -> None:
    pool(1).run(_tracked, str(tmp_path), *BRIEF)
    manifest = read_manifest(tmp_path / "checkpoint" / "step-2")
    assert manifest.trackers == {"wandb": (tmp_path / ID_FILE).read_text().strip()}


def test_keys_reach_the_plan() -> None:
    flags = [ON, "--checkpoint.interval_type=seconds", "--checkpoint.milestones=[5, 9]", "--checkpoint.keep_best=2"]
    flags += ["--validation.enable", "--checkpoint.model_weights_only", "--checkpoint.export_dtype=float16"]
    config = load([*flags, "--checkpoint.enable_first_step_checkpoint"])
    plan = resolve(config, world_size=1).checkpoint
    assert (plan.interval_type, plan.milestones, plan.keep_best, plan.first_step) == ("seconds", (5, 9), 2, True)
    assert plan.weights_only == "float16" and not plan.seed_only
    assert refused(config) == [] and without_effect(config) == []
    assert resolve(load([ON, "--checkpoint.export_dtype=float16"]), world_size=1).checkpoint.weights_only is None
    assert without_effect(load([ON, "--checkpoint.export_dtype=float16"])) == ["checkpoint.export_dtype"]
    assert resolve(load([ON, "--checkpoint.milestones=powers_of_two"]), world_size=1).checkpoint.milestones == (
        "powers_of_two"
    )


@pytest.mark.parametrize(
    ("flags", "key", "message"),
    [
        ([ON, "--checkpoint.keep_best=1"], "keep_best", "needs validation.enable = true"),
        ([ON, "--checkpoint.milestones=[0, 5]"], "milestones", "holds 0: the first step is 1"),
        (["--checkpoint.create_seed_checkpoint"], "create_seed_checkpoint", "needs checkpoint.enable_checkpoint"),
    ],
)
def test_contradictions_are_named(flags: list[str], key: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(flags)
    (problem,) = caught.value.problems
    assert problem.key == f"checkpoint.{key}" and message in problem.message


def test_a_seed_is_made_by_one_process_whatever_the_degrees() -> None:
    config = load([ON, "--checkpoint.create_seed_checkpoint", TP, PP])
    assert smallest_world(config) == 1
    mesh = resolve(config, world_size=1).mesh
    assert (mesh.tensor, mesh.pipeline, mesh.dp_degree) == (1, 1, 1)
    with pytest.raises(ConfigError, match="is made by one process, and there are 4"):
        resolve(config, world_size=4)
