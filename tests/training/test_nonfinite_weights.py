"""Weights that are not finite end a run or send it back: they are never saved, skipped over or gone on from."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor

from tests.pool import Pools
from tests.training.harness import Run, batches, build_tiny, micro_batches, run_stages
from tests.training.test_run import TINY
from tests.words import listening
from titanlite import exit_codes
from titanlite.build import read_text, to_device
from titanlite.checkpoint import Checkpointer, CheckpointError, manager
from titanlite.checkpoint.manifest import steps_in
from titanlite.config.sections.checkpoint import Checkpoint
from titanlite.guard import FiniteGuard, WeightsError, find_nonfinite
from titanlite.loss import cross_entropy_sum
from titanlite.parallel.world import World
from titanlite.prepare import load_plans
from titanlite.runs.record import read_entries
from titanlite.step import Duplicates, train_step
from titanlite.tools.tensors import Contents
from titanlite.trainer import Trainer

TOKENS, LABELS = batches(1, 4, 16, 192)
RUN = Run(TOKENS, LABELS, [3e-3])
NAN = float("nan")


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _search(world: World) -> list[str]:
    def found(*tensors: torch.Tensor) -> str:
        return find_nonfinite({f"t{i}": tensor for i, tensor in enumerate(tensors)})

    def one(value: float, dtype: torch.dtype, rank: int = 1) -> torch.Tensor:
        tensor = torch.ones(1000, dtype=dtype)
        tensor[777] = value if world.rank == rank else 1.0
        return tensor

    whole = torch.ones(3, dtype=torch.int64)
    largest = [torch.full((100,), torch.finfo(t).max, dtype=t) for t in (torch.float16, torch.bfloat16, torch.float32)]
    return [
        found(whole, torch.empty(0), *largest, torch.ones(3, dtype=torch.float64) * 1e300),
        *(found(whole, *largest, one(NAN, t)) for t in (torch.float16, torch.bfloat16, torch.float32, torch.float64)),
        found(one(-float("inf"), torch.float32), one(NAN, torch.float32)),
        found(one(1.0, torch.float32), one(NAN, torch.float32, rank=0)),
        found(torch.tensor([float("inf"), -float("inf")])),
    ]


def test_the_search_finds_what_is_not_finite_and_nothing_else(pool: Pools) -> None:
    for found in pool(2).run(_search):
        assert found == ["", *["t4 on rank 1"] * 4, "t0 on rank 1", "t1 on rank 0", "t0 on ranks 0, 1"]


def _saves(world: World, folder: str, run: Run, mode: Any) -> list[str]:
    """Save with a NaN in a weight of the last rank, then in a moment of it, then with neither; what each save says."""
    model, optimizer, rank = build_tiny(world, run)
    mesh = run.mesh(world.size)
    train_step(
        model,
        optimizer,
        to_device(micro_batches(run, 0, rank, mesh.dp_degree), world.device),
        step=1,
        lr=3e-3,
        max_norm=1.0,
        guard=FiniteGuard(world.device),
        duplicates=Duplicates(mesh.pipeline),
        pipeline=run_stages(model, run, world, cross_entropy_sum) if mesh.pipeline > 1 else None,
    )
    saver = Checkpointer(Checkpoint(folder=folder, async_mode=mode), world, {})
    weight = list(model.parameters())[-1]
    said = []
    for kind, spoilt in (
        (None, weight),
        ("bfloat16", weight),
        (None, optimizer.state[weight]["exp_avg"]),
        (None, None),
    ):
        kept = None if spoilt is None else _local(spoilt).detach().clone()
        if spoilt is not None and world.rank == world.size - 1:
            _local(spoilt).data.view(-1)[-1:] = NAN
        try:
            saver.save(1, model, optimizer, {"tokens_seen": 0}, weights_only=kind)
            saver.wait()
            said.append("saved")
        except WeightsError as error:
            said.append(f"{error} {sorted(path.name for path in Path(folder).glob('*'))}")
        if spoilt is not None and kept is not None:
            _local(spoilt).data.copy_(kept)
    saver.close()
    return said


@pytest.mark.parametrize("mode", ["disabled", "async", "async_with_pinned_mem"])
@pytest.mark.parametrize("run", [RUN, replace(RUN, pipeline=2)], ids=["sharded", "pipeline"])
def test_no_save_publishes_what_is_not_finite(pool: Pools, tmp_path: Path, mode: str, run: Run) -> None:
    for said in pool(2).run(_saves, str(tmp_path), run, mode):
        weight = "step 1: model.output.weight on rank 1 is not finite after step 1. No checkpoint is written"
        assert all(words.startswith(weight) and words.endswith(" []") for words in said[:2]), "nothing was written"
        assert "optimizer.state.output.weight.exp_avg on rank 1 is not finite" in said[2]
        assert said[3] == "saved"
    assert steps_in(tmp_path) == [1]


def _too_large(world: World, folder: str) -> str:
    model, optimizer, _ = build_tiny(world, RUN)
    _local(list(model.parameters())[-1]).data.fill_(1e6)
    saver = Checkpointer(Checkpoint(folder=folder), world, {})
    with pytest.raises(CheckpointError) as caught:
        saver.save(1, model, optimizer, {}, weights_only="float16")
    saver.close()
    return str(caught.value)


def test_good_weights_that_the_type_of_the_save_cannot_hold_are_told_apart(pool: Pools, tmp_path: Path) -> None:
    (said,) = pool(1).run(_too_large, str(tmp_path))
    assert said == "model.output.weight on rank 0 does not fit float16: choose another checkpoint.export_dtype"


def _run(world: World, folder: str, spoilt: int, *flags: str, checked: bool = True) -> dict[str, Any]:
    """Train; a weight of the last rank turns NaN once, by the update of step `spoilt`. How that ended.

    checked: otherwise saves do not look, as in versions that did not.
    """
    given = [*TINY, "--no-validation.enable", "--training.steps=8", f"--job.dump_folder={folder}", *flags]
    plans = load_plans("debug_model.toml", world.size, given)
    trainer = Trainer(plans, world, read_text(plans))
    left = [spoilt]

    def spoil(*_: Any) -> None:
        if trainer.step in left:
            left.clear()
            if world.rank == world.size - 1:
                _local(list(trainer.parts.model.parameters())[-1]).data.view(-1)[0] = NAN

    trainer.parts.optimizer.register_step_post_hook(spoil)
    found: dict[str, Any] = {"code": exit_codes.DONE, "error": ""}
    real = manager.find_nonfinite
    if not checked:
        manager.find_nonfinite = lambda *_: ""
    with listening() as said:
        try:
            trainer.train()
        except (WeightsError, CheckpointError) as error:
            found.update(code=exit_codes.code_of(error), error=str(error))
        finally:
            manager.find_nonfinite = real
    events = Path(folder) / "guard.jsonl"
    found["events"] = [json.loads(line) for line in events.read_text().splitlines()] if events.exists() else []
    return {**found, "said": said, "step": trainer.step}


def _nonfinite_in(folder: Path) -> list[str]:
    """Names of the tensors in a checkpoint that are not finite."""
    contents = Contents(folder)
    tensors = {name: contents.read(name) for name in contents.manifest.tensors}
    return [name for name, tensor in tensors.items() if not tensor.isfinite().all()]


EVERY_TWO = "--checkpoint.interval=2"


def test_a_weight_that_turns_nan_is_not_saved_and_the_restart_goes_on(pool: Pools, tmp_path: Path) -> None:
    for found in pool(2).run(_run, str(tmp_path), 4, EVERY_TWO):
        assert found["code"] == exit_codes.GUARD
        assert found["error"] == (
            "step 4: model.output.weight on rank 1 is not finite after step 4. No checkpoint is written"
        )
    (event,) = found["events"]
    assert (event["step"], event["kind"], event["action"]) == (4, "weights not finite", "stop")
    end = read_entries(tmp_path)[-1]
    assert (end["state"], end["exit_code"], end["step"], end["saved_step"]) == ("stopped", exit_codes.GUARD, 4, 2)
    assert sorted(path.name for path in (tmp_path / "checkpoint").iterdir()) == ["step-2"]
    again = pool(2).run(_run, str(tmp_path), 0, EVERY_TWO)[0]
    assert (again["step"], again["error"]) == (8, "")
    assert any("resumed from step 2" in line for line in again["said"])


def test_a_rollback_leaves_weights_that_are_not_finite_behind(pool: Pools, tmp_path: Path) -> None:
    found = pool(2).run(_run, str(tmp_path), 4, EVERY_TWO, "--guard.policy=rollback")[0]
    assert (found["step"], found["error"]) == (8, "")
    (event,) = found["events"]
    assert (event["step"], event["action"], event["back_to_step"], event["left_out"]) == (4, "rollback", 2, "3-4")
    assert steps_in(tmp_path / "checkpoint") == [2, 4, 6, 8]


def test_steps_are_not_skipped_where_the_weights_are_to_blame(pool: Pools, tmp_path: Path) -> None:
    flags = ["--guard.policy=skip", "--guard.max_skips=50", "--checkpoint.interval=100"]
    for found in pool(2).run(_run, str(tmp_path), 4, *flags):
        assert found["code"] == exit_codes.GUARD and found["step"] == 5
        assert found["error"] == (
            "step 5: model.output.weight on rank 1 is not finite after step 4. Skipping steps cannot mend that"
        )
    assert steps_in(tmp_path / "checkpoint") == [] and [e["action"] for e in found["events"]] == ["stop"]
    end = read_entries(tmp_path)[-1]
    assert (end["state"], end["exit_code"], end["step"]) == ("stopped", exit_codes.GUARD, 4)


def test_an_older_version_s_checkpoint_of_such_weights_is_passed_over(pool: Pools, tmp_path: Path) -> None:
    flags = [EVERY_TWO, "--training.steps=4"]
    pool(2).run(_run, str(tmp_path), 4, *flags, checked=False)
    root = tmp_path / "checkpoint"
    assert steps_in(root) == [2, 4]
    named = f"--checkpoint.initial_load_path={root}/step-4"
    other = pool(2).run(_run, str(tmp_path / "other"), 0, named)[0]
    why = f"{root}/step-4 holds what is not finite (model.output.weight on rank 1)"
    assert other["code"] == exit_codes.CHECKPOINT and other["error"].startswith(f"checkpoint.initial_load_path: {why}")
    found = pool(2).run(_run, str(tmp_path), 0, EVERY_TWO)[0]
    assert (found["step"], found["error"]) == (8, "")
    (passed,) = [line for line in found["said"] if line.startswith("passed over")]
    assert passed.startswith(f"passed over: {why}") and f"`titanlite checkpoint rm {root}/step-4` deletes it" in passed
    assert any("resumed from step 2" in line for line in found["said"])
    assert _nonfinite_in(root / "step-4") == [], "the good one of that step has its place"


def test_with_no_other_checkpoint_the_run_does_not_start(pool: Pools, tmp_path: Path) -> None:
    pool(2).run(_run, str(tmp_path), 2, "--training.steps=2", checked=False)
    found = pool(2).run(_run, str(tmp_path), 0)[0]
    assert found["code"] == exit_codes.CHECKPOINT and found["step"] == 0
    assert "has no valid checkpoint" in found["error"] and "titanlite checkpoint rm" in found["error"]
