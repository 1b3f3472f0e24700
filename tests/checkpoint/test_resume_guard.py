"""The verdict on a resume: by itself, and in whole runs."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.pool import Pools
from tests.training.test_run import ROOT, TINY, _losses, _run
from titanlite.build import read_datasets
from titanlite.checkpoint.loading import LoadedState
from titanlite.checkpoint.manifest import read_manifest
from titanlite.checkpoint.resume_guard import FILE, STATE, ResumeGuard
from titanlite.data.loader import TrainLoader, add_hashes, batch_hash
from titanlite.parallel.dist_env import DistEnv

HERE = {"ranks": "2"}


def _step(guard: ResumeGuard, step: int, loss: float, norm: float = 0.5) -> Any:
    return guard.after_step(step, torch.tensor(loss), torch.tensor(norm))


def _left(path: Path, **settings: Any) -> dict[str, Any]:
    """An attempt that has saved step 4 and done step 5; the train state of its checkpoint."""
    guard = ResumeGuard(path, 0, HERE, **settings)
    assert _step(guard, 4, 9.0) is None
    state = guard.at_save(4, "abc")
    assert _step(guard, 5, 2.5) is None and _step(guard, 6, 2.25) is None
    guard.close()
    return state


def _again(
    path: Path, state: dict[str, Any], batch: str | None = "abc", setting: dict[str, str] = HERE, **fields: Any
) -> ResumeGuard:
    guard = ResumeGuard(path, 0, setting)
    guard.resumed(LoadedState(4, state, verified=True, **fields), batch)
    return guard


def test_the_same_numbers_are_verified_bit_for_bit(tmp_path: Path) -> None:
    path = tmp_path / FILE
    guard = _again(path, _left(path))
    assert guard.before_first_step() is None
    verdict = _step(guard, 5, 2.5)
    assert verdict.verified and verdict.step == 4
    assert verdict.text == (
        "resume verified at step 4: every file is as it was written; the next batch is the one that was to come; "
        "loss 2.5 and gradient norm 0.5 of step 5 are those of the earlier attempt, bit for bit"
    )
    assert _step(guard, 6, 2.25) is None, "it is told once"


def test_the_last_bit_counts_where_nothing_else_has_changed(tmp_path: Path) -> None:
    path = tmp_path / FILE
    state = _left(path)
    near = float(torch.nextafter(torch.tensor(2.5), torch.tensor(3.0)))
    same = _step(_again(path, state), 5, near)
    assert not same.verified and "with the same setting" in same.text and "RESUME NOT VERIFIED" in same.text
    other = _step(_again(path, state, setting={"ranks": "4"}), 5, near)
    assert other.verified and "which is rounding (ranks 2 then, 4 now)" in other.text
    far = _step(_again(path, state, setting={"ranks": "4"}), 5, 2.51)
    assert not far.verified and "a relative difference of 4.0e-03 (ranks 2 then, 4 now)" in far.text
    norm = _step(_again(path, state), 5, 2.5, 0.6)
    assert not norm.verified


def test_the_coarser_attempt_decides_what_is_rounding(tmp_path: Path) -> None:
    path = tmp_path / FILE
    state = _left(path, tolerance=2e-2)
    assert _step(_again(path, state, setting={"dtype": "float32"}), 5, 2.51).verified
    assert not _step(_again(path, state, setting={"dtype": "float32"}), 5, 2.6).verified


def test_another_batch_is_named(tmp_path: Path) -> None:
    path = tmp_path / FILE
    state = _left(path)
    verdict = _step(_again(path, state, batch="xyz"), 5, 2.5)
    assert not verdict.verified and "the next batch is not the one that was to come then" in verdict.text
    allowed = _step(_again(path, state, batch="xyz", changes=("data: d there, x here",)), 5, 7.0)
    assert allowed.verified and "as allowed: data: d there, x here" in allowed.text


def test_without_an_earlier_step_there_is_nothing_to_compare(tmp_path: Path) -> None:
    path = tmp_path / FILE
    guard = ResumeGuard(path, 0, HERE)
    state = guard.at_save(4, "abc")
    guard.close()
    again = _again(path, state)
    verdict = again.before_first_step()
    assert verdict is not None and verdict.verified and "no earlier attempt has left figures of step 5" in verdict.text
    assert _step(again, 5, 2.5) is None
    third = _again(path, state)  # and that step is remembered for the attempt after it
    assert third.before_first_step() is None and _step(third, 5, 2.5).verified
    assert ResumeGuard(path, 0, HERE).before_first_step() is None, "a fresh run has nothing to say"
    told = _step(_again(path, ResumeGuard(path, 0, HERE).at_save(4, "abc")), 5, 2.5)
    assert told is not None and "no earlier attempt has left figures" in told.text, "a loop that asks after steps only"


def test_figures_belong_to_one_save(tmp_path: Path) -> None:
    """A step of the same number on another path of the run, or one without a step after it, is not compared."""
    path = tmp_path / FILE
    _left(path)
    other = ResumeGuard(path, 0, HERE).at_save(4, "abc")
    verdict = _again(path, other).before_first_step()
    assert verdict is not None and "no earlier attempt" in verdict.text


def test_what_was_not_finite_or_cannot_be_written_is_not_remembered(tmp_path: Path) -> None:
    guard = ResumeGuard(tmp_path / FILE, 0, HERE)
    guard.at_save(4, None)
    _step(guard, 5, float("nan"))
    assert not (tmp_path / FILE).exists()
    guard = ResumeGuard(tmp_path / "nowhere" / FILE, 0, HERE)
    guard.at_save(4, None)
    assert _step(guard, 5, 2.5) is None, "training goes on"


def test_a_torn_line_costs_only_itself(tmp_path: Path) -> None:
    path = tmp_path / FILE
    path.write_bytes(b'{"id": "torn')
    state = _left(path)
    assert _step(_again(path, state), 5, 2.5).verified
    assert len(path.read_bytes().splitlines()) == 2


def test_other_ranks_keep_silent(tmp_path: Path) -> None:
    guard = ResumeGuard(tmp_path / FILE, 1, HERE)
    guard.resumed(LoadedState(4, guard.at_save(4, "abc"), verified=True), "abc")
    assert guard.before_first_step() is None and _step(guard, 5, 2.5) is None
    assert not list(tmp_path.iterdir())


@pytest.fixture(scope="module")
def left(pool: Pools, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on two ranks that was lost at step 6; its checkpoint is of step 4."""
    folder = tmp_path_factory.mktemp("left")
    pool(2).run(_run, str(folder), "--training.steps=6", "--checkpoint.interval=4")
    shutil.rmtree(folder / "checkpoint" / "step-6")
    return folder


def _resume(pool: Pools, ranks: int, left: Path, folder: Path, *flags: str, function: Any = _run) -> dict[str, Any]:
    shutil.copytree(left, folder)
    found: dict[str, Any] = pool(ranks).run(function, str(folder), "--training.steps=6", *flags)[0]
    return found


def _verdict(found: dict[str, Any]) -> str:
    (line,) = [line for line in found["said"] if line.lower().startswith("resume ")]
    return str(line)


@pytest.mark.parametrize(
    ("ranks", "end"),
    [(2, "bit for bit"), (1, "2 then, 1 now"), pytest.param(4, "2 then, 4 now", marks=pytest.mark.slow)],
)
def test_a_run_that_goes_on_is_verified(pool: Pools, left: Path, tmp_path: Path, ranks: int, end: str) -> None:
    verdict = _verdict(_resume(pool, ranks, left, tmp_path / "run"))
    assert verdict.startswith("resume verified at step 4: every file is as it was written; the next batch is the one")
    assert end in verdict


def _skipping(world: DistEnv, folder: str, *flags: str) -> dict[str, Any]:
    """A run whose loader begins one step later than it was told."""
    real = TrainLoader.load_state_dict

    def late(self: TrainLoader, state: dict[str, int]) -> None:
        real(self, {"next_sequence": state["next_sequence"] + 8})

    TrainLoader.load_state_dict = late  # type: ignore[method-assign]
    try:
        return _run(world, folder, *flags, "--data.prefetch=0")
    finally:
        TrainLoader.load_state_dict = real  # type: ignore[method-assign]


def test_a_skipped_batch_is_found(pool: Pools, left: Path, tmp_path: Path) -> None:
    verdict = _verdict(_resume(pool, 2, left, tmp_path / "run", function=_skipping))
    assert "RESUME NOT VERIFIED at step 4: the next batch is not the one that was to come then" in verdict


def _other_weights(world: DistEnv, folder: str, *flags: str) -> dict[str, Any]:
    """A run that loads the weights a little wrong."""
    from titanlite.checkpoint import loading

    real = loading.scatter

    def wrong(tensors: dict[str, torch.Tensor], *rest: Any) -> None:
        tensors["model.output.weight"].mul_(1.001)
        real(tensors, *rest)

    loading.scatter = wrong
    try:
        return _run(world, folder, *flags)
    finally:
        loading.scatter = real


@pytest.mark.slow
def test_wrong_weights_are_found(pool: Pools, left: Path, tmp_path: Path) -> None:
    verdict = _verdict(_resume(pool, 2, left, tmp_path / "run", function=_other_weights))
    assert "RESUME NOT VERIFIED at step 4: loss" in verdict and "with the same setting" in verdict


def _served(world: DistEnv, folder: str, steps: int) -> str:
    """Hash of what this rank's loader serves in the step after `steps`."""
    plans = load_plans("debug_model.toml", world.size, [*TINY, f"--job.dump_folder={folder}"])
    loader = TrainLoader(
        read_text(plans).train, plans.batch.global_batch_size, plans.batch.micro_batch_size, world.rank, world.size
    )
    for _ in range(steps + 1):
        batches = loader.next_step()
    return batch_hash(batches)


@pytest.mark.parametrize("ranks", [1, 2, pytest.param(4, marks=pytest.mark.slow)])
def test_the_hash_is_of_what_loaders_serve_on_any_number_of_ranks(
    pool: Pools, left: Path, tmp_path: Path, ranks: int
) -> None:
    manifest = read_manifest(left / "checkpoint" / "step-4")
    assert add_hashes(pool(ranks).run(_served, str(tmp_path), 4)) == manifest.train[STATE]["next_batch"]
    assert add_hashes(pool(ranks).run(_served, str(tmp_path), 5)) != manifest.train[STATE]["next_batch"]


@pytest.mark.slow
def test_global_batch_and_text_need_their_word(pool: Pools, left: Path, tmp_path: Path) -> None:
    half = "--training.global_batch_size=4"
    refused = _resume(pool, 2, left, tmp_path / "a", half)["error"]
    assert "global batch: 8 there, 4 here (training.global_batch_size = 8 keeps it)" in refused
    assert "\n  in the config: " in refused and "training.global_batch_size: 8 -> 4" in refused
    assert "--checkpoint.allow_changes=global_batch" in refused
    found = _resume(pool, 2, left, tmp_path / "b", half, "--checkpoint.allow_changes=global_batch")
    assert "resume verified" in _verdict(found) and "as allowed: global batch: 8 there, 4 here" in _verdict(found)
    assert any("config changed since attempt 1: training.global_batch_size: 8 -> 4" in line for line in found["said"])
    tokens = {row["step"]: row["tokens_seen"] for row in found["rows"] if "loss" in row}
    assert tokens[5] - tokens[4] == tokens[4] // 8, "half as many as before"
    order = _resume(pool, 2, left, tmp_path / "c", "--data.seed=5", "--checkpoint.allow_changes=data")
    assert any("its sequence of the text here comes next" in line for line in order["said"])


@pytest.mark.slow
def test_schedule_and_text_can_begin_anew(pool: Pools, left: Path, tmp_path: Path) -> None:
    anew = "--checkpoint.exclude_from_loading=lr_scheduler,dataloader"
    found = _resume(pool, 2, left, tmp_path / "run", anew, "--checkpoint.interval=5")
    before = _losses(json.loads(line) for line in (left / "metrics.jsonl").read_text().splitlines())  # type: ignore[arg-type]
    now = _losses(found["rows"])
    assert [now[step][2] for step in (5, 6)] == [before[step][2] for step in (1, 2)]
    assert any("but with new schedule, text" in line for line in found["said"])
    shutil.rmtree(tmp_path / "run" / "checkpoint" / "step-6")
    again = pool(2).run(_run, str(tmp_path / "run"), "--training.steps=6", anew)[0]
    assert _losses(again["rows"])[6] == now[6], "the schedule and the text go on where they were"
    assert "bit for bit" in _verdict(again)


@pytest.mark.slow
def test_the_banner_says_where_a_run_starts_and_why(pool: Pools, left: Path, tmp_path: Path) -> None:
    def said(*flags: str) -> str:
        (tmp_path / "run").mkdir(exist_ok=True)
        lines = pool(1).run(_run, str(tmp_path / "run"), *flags)[0]["said"]
        (line,) = [line for line in lines if line.startswith(("a fresh run", "resumed from", "a run that starts from"))]
        return str(line)

    own, source = tmp_path / "run" / "checkpoint", f"--checkpoint.initial_load_path={left}"
    first = said("--training.steps=1", source, "--checkpoint.start=from")
    assert first == (
        f"a run that starts from {left}/checkpoint/step-4 with its weights "
        f"(checkpoint.initial_load_path; {own} has no checkpoint yet)"
    )
    entry = json.loads((tmp_path / "run" / "attempts.jsonl").read_text().splitlines()[0])
    assert entry["began"] == f"from {left}/checkpoint/step-4" and entry["step"] == 0
    why = "(checkpoint.start = resume-or-fresh; so checkpoint.initial_load_path is not used)"
    assert said("--training.steps=2", source) == f"resumed from step 1 in {own} {why}"
    assert said("--training.steps=2", "--checkpoint.load_step=2") == (
        f"resumed from step 2 in {own} (checkpoint.load_step = 2)"
    )
    shutil.rmtree(tmp_path / "run")
    assert said("--training.steps=1", "--checkpoint.start=fresh") == (
        f"a fresh run (checkpoint.start = fresh): no checkpoint to resume in {own}"
    )


@pytest.mark.slow
def test_a_killed_run_is_verified_by_the_next_start(tmp_path: Path) -> None:
    """SIGKILL two steps after a save: what the verdict needs is on the disk by then."""
    command = [sys.executable, "train.py", "--job.config_file=debug_model.toml", *TINY, "--no-validation.enable"]
    command += [f"--job.dump_folder={tmp_path}"]
    options: dict[str, Any] = {"cwd": ROOT, "env": {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}}
    flags = ["--training.steps=4000", "--checkpoint.interval=4"]
    with subprocess.Popen([*command, *flags], stdout=subprocess.PIPE, text=True, **options) as lost:
        try:
            assert lost.stdout is not None
            assert any("step:  6" in line for line in lost.stdout), "it ended before step 6"
        finally:
            lost.kill()
    for folder in (tmp_path / "checkpoint").glob("step-*"):
        if folder.name != "step-4":  # it may have come further by then
            shutil.rmtree(folder)
    done = subprocess.run([*command, "--training.steps=5"], capture_output=True, text=True, timeout=300, **options)
    assert done.returncode == 0, done.stderr
    (verdict,) = [line for line in done.stdout.splitlines() if "resume verified" in line]
    assert "verified at step 4" in verdict and "bit for bit" in verdict
