"""Whole runs with bad steps or bad weights: skipped, stopped, or rolled back to a run that left the
text out.
"""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from tests.support.harness import Run, batches, run_stages, stepper
from tests.support.whole_runs import (
    GLOBAL,
    losses_of,
    make_trainer,
    names_in,
    outcome_of,
    poisoned_run,
    scalars,
)
from titanlite import exit_codes
from titanlite.assembly.datasets import read_datasets
from titanlite.checkpoint import manager
from titanlite.checkpoint.manager import Checkpointer
from titanlite.checkpoint.manifest import CheckpointError, steps_in
from titanlite.cli.hub.compare_checkpoints import Contents, compare
from titanlite.config.sections import Checkpoint
from titanlite.dist.dist_env import DistEnv
from titanlite.dist.local_parts import local
from titanlite.loss import cross_entropy_sum
from titanlite.optim.bad_step_errors import WeightsError
from titanlite.resolve.load import load_config
from titanlite.runs.attempts import read_entries

NAN = float("nan")


def _loop(folder: Path) -> dict[str, Any]:
    """What a checkpoint holds of the loop."""
    return Contents(folder).manifest.train


def test_skip_goes_on_and_records_the_documents(golden):
    rows = golden.rows()
    assert [step for step, row in rows.items() if not math.isfinite(float(row["loss"]))] == [5]
    assert sorted(rows) == list(range(1, 25))
    (event,) = golden.events()
    said = {"step": 5, "action": "skip", "kind": "not finite", "ranks": [1]}
    assert event == event | said | {"loss": "nan", "data_steps": "5"}
    text = read_datasets(load_config(str(golden.folder / "config.toml"), 2)).train
    assert event["documents"] == {str(n): names_in(text, n) for n in range(32, 40)}
    (line,) = [line for line in golden.console()[0] if "Skipped" in line]
    assert line.startswith("WARNING: step 5: loss nan")
    assert "rank 1" in line
    assert "guard.jsonl" in line


SPIKES = ["--guard.spike_sigmas=6", "--guard.window=6", "--guard.max_skips=2"]
SHORT = ["--checkpoint.interval=4", "--training.steps=9", *SPIKES]
ROLLBACK = "--guard.policy=rollback"
EVERY_TWO = "--checkpoint.interval=2"


def test_a_rollback_is_the_run_that_left_the_stretch_out(pool, tmp_path):
    rolled = tmp_path / "rolled"
    plain = tmp_path / "plain"
    found = pool(2).run(
        poisoned_run, str(rolled), {6: NAN}, *SHORT, ROLLBACK, "--metrics.enable_tensorboard"
    )[0]
    pool(2).run(poisoned_run, str(plain), {}, *SHORT, "--training.steps=4")
    other = pool(2).run(poisoned_run, str(plain), {}, *SHORT, "--data.skip_steps=5-6")[0]
    assert found["step"] == other["step"] == 9
    assert losses_of(found["rows"]) == losses_of(other["rows"])
    assert [row["step"] for row in found["rows"]] == list(range(1, 10)), "no step twice"
    (dated,) = (rolled / "tb").iterdir()
    assert [step for step, _ in scalars(dated)["loss_metrics/global_avg_loss"]] == list(
        range(1, 10)
    )
    state = _loop(rolled / "checkpoint" / "step-9")
    assert state["data"] == {"next_sequence": 11 * GLOBAL, "left_out": [[4 * GLOBAL, 6 * GLOBAL]]}
    assert len(state["guard"]["losses"]) == 6
    # The one thing that differs: the budget.
    assert state["guard"].pop("bad_steps") == [6]
    assert state == _loop(plain / "checkpoint" / "step-9")
    (verdict,) = [line for line in other["said"] if line.startswith("resume verified")]
    assert "as allowed: data.skip_steps" in verdict
    step_9 = [Contents(folder / "checkpoint" / "step-9") for folder in (rolled, plain)]
    assert [difference.name for difference in compare(*step_9) if difference.elements] == []
    (event,) = found["events"]
    assert event == event | {"action": "rollback", "back_to_step": 4, "left_out": "5-6"}
    assert event["documents"] == {str(n): found["documents"][str(n)] for n in range(40, 48)}


@pytest.mark.slow
def test_rollbacks_end_with_their_budget_or_without_a_checkpoint(pool, tmp_path):
    flags = (*SHORT, ROLLBACK)
    poison = dict.fromkeys((6, 8, 11), NAN)
    asynchronous = (*flags, "--checkpoint.async_mode=async")
    found, other = pool(2).run(poisoned_run, str(tmp_path / "a"), poison, *asynchronous)
    steps = [(e["step"], e["action"], e["data_steps"]) for e in found["events"]]
    assert steps == [(6, "rollback", "6"), (6, "rollback", "8"), (7, "stop", "11")]
    assert found["code"] == other["code"] == exit_codes.GUARD
    assert "bad were the steps 6, 6, 7" in found["error"] == other["error"]
    found = pool(2).run(poisoned_run, str(tmp_path / "b"), {2: NAN}, *flags)[0]
    assert found["code"] == exit_codes.GUARD
    assert "nothing to go back to" in found["error"]


@pytest.mark.slow
def test_a_checkpoint_with_bad_weights_is_left_for_the_one_before(pool, tmp_path):
    """Whatever is read behind the checkpoint of step 4, step 5 or 6 is bad, until the run goes on
    from step 2.
    """
    poison = dict.fromkeys((5, 7, 8), NAN)  # in the data order: each time another stretch
    flags = (EVERY_TWO, "--training.steps=8", ROLLBACK)
    found = pool(2).run(poisoned_run, str(tmp_path), poison, *flags)[0]
    assert [(e["step"], e["back_to_step"], e["left_out"]) for e in found["events"]] == [
        (5, 4, "5"),
        (6, 4, "5-7"),
        (5, 2, "3-8"),
    ]
    assert found["step"] == 8 and [row["step"] for row in found["rows"]] == list(range(1, 9)), (
        "no step twice"
    )
    root = tmp_path / "checkpoint"
    why = (root / "step-4.invalid-0" / "invalid.txt").read_text()
    assert "suspect" in why
    assert "2 times" in why
    assert "the last time step 5" in why
    assert sorted(path.name for path in root.iterdir()) == [
        "step-2",
        "step-4",
        "step-4.invalid-0",
        "step-6",
        "step-8",
    ]
    assert _loop(root / "step-4")["data"] == {
        "next_sequence": 10 * GLOBAL,
        "left_out": [[2 * GLOBAL, 8 * GLOBAL]],
    }
    (end,) = [entry for entry in read_entries(tmp_path) if entry["event"] == "end"]
    assert end == end | {"state": "done", "saved_step": 8, "lost_steps": 0}


@pytest.mark.slow
def test_weights_that_make_every_step_bad_do_not_push_out_the_last_good_ones(pool, tmp_path):
    """The steps after 4 are all skipped, whatever the text: what is saved then was never proven."""
    poison = dict.fromkeys(range(5, 12), NAN)
    flags = ("--training.steps=9", "--guard.policy=skip", "--guard.max_skips=9")
    keep = (EVERY_TWO, "--checkpoint.keep_latest_k=2")
    found = pool(2).run(poisoned_run, str(tmp_path), poison, *flags, *keep)[0]
    assert [event["step"] for event in found["events"]] == [5, 6, 7, 8, 9]
    assert steps_in(tmp_path / "checkpoint") == [2, 4, 6, 8, 9], (
        "2 is the newest of which later steps were good"
    )


# Weights that are not finite: never saved, skipped over or gone on from


RUN = Run(*batches(1, 4, 16, 192), [3e-3])


def _saves(world: DistEnv, folder: str, run: Run, mode: Any) -> list[str]:
    """Save with a bad value in a weight of the last rank, then in a moment of it, then with a good
    one; what each save says.
    """
    model, optimizer, take = stepper(world, run)
    take(1, pipeline=run_stages(model, run, world, cross_entropy_sum))
    saver = Checkpointer(
        Checkpoint(enable_checkpoint=True, folder=folder, async_mode=mode), world, {}
    )
    weight = list(model.parameters())[-1]
    moment = optimizer.state[weight]["exp_avg"]
    said = []
    for kind, spoilt, value in (
        (None, weight, NAN),
        ("bfloat16", weight, NAN),
        (None, moment, NAN),
        ("float16", weight, 1e6),
        (None, weight, 0.0),
    ):
        part = local(spoilt).detach()
        kept = part.clone()
        if world.rank == world.size - 1:
            part.view(-1)[-1:] = value
        try:
            saver.save(1, model, optimizer, {"tokens_seen": 0}, weights_only=kind)
            saver.wait()
            said.append("saved")
        except (WeightsError, CheckpointError) as error:
            said.append(f"{error} {sorted(path.name for path in Path(folder).glob('*'))}")
        part.copy_(kept)
    saver.close()
    return said


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(
    ("run", "mode"),
    [(RUN, "async"), (replace(RUN, pipeline=2), "disabled")],
    ids=["sharded", "pipeline"],
)
def test_no_save_publishes_what_is_not_finite(pool, tmp_path, mode, run):
    for said in pool(2).run(_saves, str(tmp_path), run, mode):
        weight = "step 1: model.output.weight on rank 1 is not finite after step 1"
        assert all(words.startswith(weight) and words.endswith(" []") for words in said[:2]), (
            "nothing was written"
        )
        assert "optimizer.state.output.weight.exp_avg on rank 1 is not finite" in said[2]
        assert "model.output.weight on rank 1 does not fit float16" in said[3]
        assert "checkpoint.export_dtype" in said[3]
        assert said[4] == "saved"
    assert steps_in(tmp_path) == [1]


def _spoil_weight(world: DistEnv, folder: str, spoilt: int, *flags: str) -> dict[str, Any]:
    """Train; a weight of the last rank turns NaN once, by the update of step `spoilt`.

    How that ended.
    """
    trainer = make_trainer(world, folder, "--no-validation.enable", "--training.steps=8", *flags)
    left = [spoilt]

    def spoil(*_: Any) -> None:
        if trainer.step in left:
            left.clear()
            if world.rank == world.size - 1:
                local(list(trainer.parts.model.parameters())[-1]).data.view(-1)[0] = NAN

    trainer.parts.optimizer.register_step_post_hook(spoil)
    return outcome_of(trainer, folder)


def _spoil_unseen(world: DistEnv, *given: Any) -> None:
    """The same where saves do not look, as in older versions."""
    with patch.object(manager, "check_finite", lambda *_: None):
        _spoil_weight(world, *given)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("policy", "mode"),
    [("stop", "async"), ("rollback", "disabled"), ("skip", "disabled")],
)
def test_no_policy_goes_on_with_weights_that_are_not_finite(pool, tmp_path, policy, mode):
    """The save after step 4 finds the NaN, or else the step after it."""
    flags = [f"--guard.policy={policy}", "--guard.max_skips=50", f"--checkpoint.async_mode={mode}"]
    flags += ["--checkpoint.interval=100" if policy == "skip" else EVERY_TWO]
    found = pool(2).run(_spoil_weight, str(tmp_path), 4, *flags)[0]
    (event,) = found["events"]
    if policy == "rollback":
        assert (found["step"], found["error"]) == (8, "")
        told = {"step": 4, "action": policy, "back_to_step": 2, "left_out": "3-4"}
        assert event == event | told
        assert steps_in(tmp_path / "checkpoint") == [2, 4, 6, 8]
        return
    step, saved = (4, 2) if policy == "stop" else (5, None)
    assert found["code"] == exit_codes.GUARD
    assert (event["action"], event["kind"]) == ("stop", "weights not finite")
    assert found["error"].startswith(
        f"step {step}: model.output.weight on rank 1 is not finite after step 4"
    )
    end = read_entries(tmp_path)[-1]
    assert end == end | {"state": "stopped", "step": 4, "saved_step": saved}
    again = pool(2).run(_spoil_weight, str(tmp_path), 0, *flags)[0]
    assert (again["step"], again["error"]) == (8, "")
    assert saved is None or any(f"resumed from step {saved}" in line for line in again["said"])


@pytest.mark.slow
def test_an_older_version_s_checkpoint_of_such_weights_is_passed_over(pool, tmp_path):
    pool(2).run(_spoil_unseen, str(tmp_path), 4, EVERY_TWO, "--training.steps=4")
    root = tmp_path / "checkpoint"
    assert steps_in(root) == [2, 4]
    why = f"{root}/step-4 holds values that are not finite (model.output.weight on rank 1)"
    found = pool(2).run(_spoil_weight, str(tmp_path), 0, EVERY_TWO)[0]
    assert (found["step"], found["error"]) == (8, "")
    (passed,) = [line for line in found["said"] if line.startswith("passed over")]
    assert passed.startswith(f"passed over: {why}")
    assert any("resumed from step 2" in line for line in found["said"])
    contents = Contents(root / "step-4")
    assert all(contents.read(name).isfinite().all() for name in contents.manifest.tensors), (
        "a good one is there now"
    )
