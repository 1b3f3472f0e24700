"""Skipped steps change no bit, spikes are found as the formula says, rollbacks are runs that left the stretch out."""

from __future__ import annotations

import json
import math
import random
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.metrics.test_nan_finder import W2
from tests.metrics.test_records import scalars
from tests.pool import Pools
from tests.training.harness import (
    LateGuard,
    Run,
    all_stages,
    batches,
    build_tiny,
    full,
    micro_batches,
    run_stages,
    sequence_part,
)
from tests.training.test_run import TINY, _losses
from tests.words import listening
from titanlite import exit_codes
from titanlite.build import read_text, to_device
from titanlite.checkpoint.manifest import steps_in
from titanlite.config.plans import GuardPlan
from titanlite.guard import BadStepError, FiniteGuard, LossSpikeError
from titanlite.loss import cross_entropy_sum
from titanlite.metrics.float8_error import Float8Error
from titanlite.metrics.jsonl import read_metrics
from titanlite.parallel.tensor import tensor_loss
from titanlite.parallel.world import World
from titanlite.prepare import load_plans
from titanlite.runs.record import read_entries
from titanlite.step import Duplicates, train_step
from titanlite.tools.tensors import Contents, compare
from titanlite.trainer import Trainer

CPU = torch.device("cpu")
TOKENS, LABELS = batches(6, 4, 16, 192)
RUN = Run(TOKENS, LABELS, [3e-3] * 6)
BAD = 3


def _state(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Weights, moments and the optimizer's count of steps."""
    state = {name: full(p) for name, p in model.named_parameters()}
    for name, p in model.named_parameters():
        state.update({f"{name}.{key}": full(value) for key, value in optimizer.state[p].items()})
    return state


def _equal(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def _train(world: World, run: Run, value: float | None) -> dict[str, Any]:
    """Six steps with `value` put into the third on one rank, or five without that batch where it is None."""
    model, optimizer, rank = build_tiny(world, run)
    plan = run.mesh(world.size)
    loss = tensor_loss(cross_entropy_sum) if plan.tensor > 1 else cross_entropy_sum
    guard = FiniteGuard(world.device, GuardPlan("skip", max_skips=1))
    poison = False

    def spoil(module: Any, inputs: Any, out: torch.Tensor) -> torch.Tensor:
        return out * torch.tensor(value) if poison else out

    for name, module in model.named_modules():
        if name.endswith(W2):
            module.register_forward_hook(spoil)
    states, skipped = [], []
    for step in range(1, 7):
        if value is None and step == BAD:
            continue
        poison = value is not None and step == BAD and world.rank == world.size - 1
        own = sequence_part(run, micro_batches(run, step - 1, rank, plan.dp_degree), world.rank)
        train_step(
            model,
            optimizer,
            to_device(own, world.device),
            step=step,
            lr=3e-3,
            max_norm=1.0,
            guard=guard,
            duplicates=Duplicates(plan.tensor * plan.pipeline, plan.tensor),
            loss_function=loss,
            pipeline=run_stages(model, run, world, loss) if plan.pipeline > 1 else None,
        )
        guard.watch()
        skipped += [(bad.step, bad.ranks) for bad in guard.skipped()]
        states.append(_state(model, optimizer))
    return {"states": [all_stages(model, state) for state in states], "skipped": skipped}


@pytest.mark.parametrize(
    ("implementation", "values"),
    [
        pytest.param("fused", (float("nan"), float("inf")), marks=pytest.mark.slow),
        ("foreach", (float("nan"),)),
        pytest.param("for-loop", (float("nan"),), marks=pytest.mark.slow),
    ],
    ids=["fused", "foreach", "for-loop"],
)
def test_a_skipped_step_leaves_no_trace(pool: Pools, implementation: str, values: tuple[float, ...]) -> None:
    run = replace(RUN, implementation=implementation)
    without = pool(2).run(_train, run, None)
    for value in values:
        for found, other in zip(pool(2).run(_train, run, value), without, strict=True):
            states = found["states"]
            assert found["skipped"] == [(BAD, [1])]
            assert _equal(states[BAD - 1], states[BAD - 2]), "weights, moments and step count stay bit for bit"
            assert not _equal(states[BAD], states[BAD - 1]), "the step after it trains"
            assert _equal(states[-1], other["states"][-1]), "as if the batch had never been there"


@pytest.mark.slow
@pytest.mark.parametrize(
    "run",
    [replace(RUN, accumulation=2), replace(RUN, tensor=2), replace(RUN, context=2), replace(RUN, pipeline=2)],
    ids=["accumulation", "tensor", "context", "pipeline"],
)
def test_all_ranks_skip_alike_however_they_share_the_work(pool: Pools, run: Run) -> None:
    without = pool(2).run(_train, run, None)
    for found, other in zip(pool(2).run(_train, run, float("nan")), without, strict=True):
        assert [step for step, _ in found["skipped"]] == [BAD]
        assert _equal(found["states"][BAD - 1], found["states"][BAD - 2])
        assert _equal(found["states"][-1], other["states"][-1])


# Spikes, by numbers alone


def _feed(guard: FiniteGuard, step: int, loss: float) -> bool:
    """One step with this loss; whether it may update."""
    value = torch.tensor(loss)
    ok = bool(guard.gate(step, torch.tensor(1.0), value, value))
    guard.watch()
    return ok


def _noisy(seed: int, steps: int) -> list[float]:
    """Losses that fall and jitter, with jumps here and there."""
    draw = random.Random(seed)
    losses = [8 * 0.97**n + draw.gauss(0, 0.05) for n in range(steps)]
    return [loss + (draw.uniform(0.1, 3) if draw.random() < 0.08 else 0) for loss in losses]


@pytest.mark.parametrize(("sigmas", "window"), [(3.0, 12), (1.5, 7), (6.0, 30)])
def test_spikes_are_those_of_the_formula(sigmas: float, window: int) -> None:
    """Against mean and sample deviation of Python's own over the last losses that were not flagged."""
    guard = FiniteGuard(CPU, GuardPlan("skip", 149, sigmas, 150))
    guard._window = type(guard._window)(window, sigmas, CPU)  # type: ignore[misc]
    kept: list[float] = []
    flagged = []
    for step, loss in enumerate(_noisy(5, 150), 1):
        loss = torch.tensor(loss).item()  # float32, as a step's loss is
        good = True
        if len(kept) >= min(window, max(20, window // 2)):
            mean = statistics.mean(kept)
            good = loss <= mean + sigmas * max(statistics.stdev(kept), 1e-3 * mean)
        assert _feed(guard, step, loss) == good, step
        if good:
            kept = [*kept, loss][-window:]
        else:
            flagged.append(step)
    assert flagged == [bad.step for bad in guard.skipped()] and 2 < len(flagged) < 100


def test_losses_that_hardly_vary_make_no_spike_of_rounding() -> None:
    guard = FiniteGuard(CPU, GuardPlan(spike_sigmas=3.0, window=4))
    for step in range(1, 20):
        assert _feed(guard, step, 2.0 + 1e-6 * (step % 2))
    assert _feed(guard, 20, 2.005)
    with pytest.raises(LossSpikeError, match=r"the loss jumped over 2\.00\d* = 2\.00\d* \+ 3 \* 0\.00\d*"):
        _feed(guard, 21, 2.02)


def test_without_spike_sigmas_any_finite_loss_is_good() -> None:
    guard = FiniteGuard(CPU, GuardPlan(window=2))
    assert all(_feed(guard, step, loss) for step, loss in enumerate([1.0, 1.0, 1.0, 1e30], 1))


def _nan_between(world: World) -> tuple[list[bool], list[float]]:
    guard = FiniteGuard(world.device, GuardPlan("skip", 5, 4.0, 4))
    losses = [2.0, 2.1, float("nan"), 1.9, float("inf"), 2.0, 9.0, 2.05, float("-inf"), 2.0, 9.0]
    return [_feed(guard, step, loss) for step, loss in enumerate(losses, 1)], guard.state_dict()["losses"]


def test_what_is_flagged_never_enters_the_window(pool: Pools) -> None:
    (found, losses), _ = pool(2).run(_nan_between)
    assert found == [True, True, False, True, False, True, False, True, False, True, False]
    assert losses == [torch.tensor(loss).item() for loss in (1.9, 2.0, 2.05, 2.0)]


def test_statistics_survive_json_and_decide_alike_to_the_last_bit() -> None:
    plan = GuardPlan("skip", 29, 2.0, 30)
    losses = _noisy(8, 300)
    straight = FiniteGuard(CPU, plan)
    decisions = [_feed(straight, step, loss) for step, loss in enumerate(losses, 1)]
    limits = {bad.step: bad.limit for bad in straight.skipped()}  # type: ignore[attr-defined]
    assert len(limits) > 5
    broken = FiniteGuard(CPU, plan)
    for step, loss in enumerate(losses, 1):
        if step % 7 == 0:
            saved = json.dumps(broken.state_dict())
            broken = FiniteGuard(CPU, plan)
            broken.load_state_dict(json.loads(saved))
        assert _feed(broken, step, loss) == decisions[step - 1]
        for bad in broken.skipped():
            assert bad.limit == limits[bad.step]  # type: ignore[attr-defined]
    assert broken.state_dict() == straight.state_dict()


def test_the_budget_is_of_the_last_steps() -> None:
    guard = FiniteGuard(CPU, GuardPlan("skip", 2, 4.0, 10))
    bad_steps = (18, 22, 29, 33, 37)
    for step in range(1, 37):
        assert _feed(guard, step, 9.0 if step in bad_steps else 2.0) == (step not in bad_steps)
    saved = json.loads(json.dumps(guard.state_dict()))
    assert saved["bad_steps"] == [29, 33]
    guard = FiniteGuard(CPU, GuardPlan("skip", 2, 4.0, 10))
    guard.load_state_dict(saved)
    with pytest.raises(BadStepError) as caught:
        _feed(guard, 37, 9.0)
    assert "guard.max_skips = 2 within 10 steps (guard.window) is used up; bad were the steps 29, 33, 37" in str(
        caught.value
    )


# Whole runs

#: Of 8 sequences each, as TINY has them.
GLOBAL = 8


def _run(world: World, folder: str, poison: dict[int, float], *flags: str) -> dict[str, Any]:
    """Train; on the last rank, in these steps of the data order, an activation (by NaN) or the logits are scaled."""
    given = [*TINY, "--no-validation.enable", f"--job.dump_folder={folder}"]
    plans = load_plans("debug_model.toml", world.size, [*given, *flags])
    text = read_text(plans)
    trainer = Trainer(plans, world, text)
    model = trainer.parts.model

    def spoil(module: Any, inputs: Any, out: torch.Tensor) -> torch.Tensor:
        factor = poison.get(trainer.parts.loader.state_dict()["next_sequence"] // GLOBAL)
        mine = factor is not None and world.rank == world.size - 1 and (module is model) == math.isfinite(factor)
        return out * factor if mine else out

    for module in (model, model.get_submodule(W2)):
        module.register_forward_hook(spoil)
    with listening() as said:
        found: dict[str, Any] = {"said": said}
        try:
            trainer.train()
        except BadStepError as error:
            found.update(error=str(error), code=exit_codes.code_of(error), at=error.step)
    events = Path(folder) / "guard.jsonl"
    found["events"] = [json.loads(line) for line in events.read_text().splitlines()] if events.exists() else []
    found["documents"] = {str(n): text.train.documents_in(n) for n in range(12 * GLOBAL)}
    return {**found, "rows": read_metrics(Path(folder) / "metrics.jsonl"), "step": trainer.step}


def _same_checkpoint(left: Path, right: Path) -> bool:
    """Weights, moments, random generators and what is saved of the loop."""
    differences = compare(Contents(left), Contents(right))
    return _loop(left) == _loop(right) and not any(difference.elements for difference in differences)


def _loop(folder: Path) -> dict[str, Any]:
    """What a checkpoint holds of the loop, without the id of the save."""
    state = Contents(folder).manifest.train
    del state["resume"]["id"]
    return state


NAN = float("nan")


def test_skip_goes_on_and_records_the_documents(pool: Pools, tmp_path: Path) -> None:
    found = pool(2).run(_run, str(tmp_path), {5: NAN}, "--training.steps=8", "--guard.policy=skip")[0]
    assert found["step"] == 8 and "error" not in found
    losses = _losses(found["rows"])
    assert sorted(losses) == list(range(1, 9))
    assert [step for step, (loss, _, _) in losses.items() if not float("-inf") < float(loss) < float("inf")] == [5]
    (event,) = found["events"]
    assert event["step"] == 5 and event["action"] == "skip" and event["kind"] == "not finite"
    assert event["ranks"] == [1] and event["loss"] == "nan" and event["data_steps"] == "5"
    assert event["documents"] == {str(n): found["documents"][str(n)] for n in range(32, 40)}
    (line,) = [line for line in found["said"] if "Skipped" in line]
    assert line.startswith("step 5: loss nan") and "not finite on rank 1" in line and "guard.jsonl" in line


@pytest.mark.slow
def test_stop_records_the_documents_too(pool: Pools, tmp_path: Path) -> None:
    found = pool(2).run(_run, str(tmp_path), {3: NAN}, "--training.steps=8")[0]
    assert found["code"] == exit_codes.GUARD and found["at"] == 3
    (event,) = found["events"]
    assert event["action"] == "stop" and event["message"] == found["error"] and len(event["documents"]) == 8


SPIKES = ["--guard.spike_sigmas=6", "--guard.window=6", "--guard.max_skips=2"]
SHORT = ["--checkpoint.interval=4", "--training.steps=12", *SPIKES]


@pytest.mark.slow
def test_a_rollback_is_the_run_that_left_the_stretch_out(pool: Pools, tmp_path: Path) -> None:
    rolled, plain = tmp_path / "rolled", tmp_path / "plain"
    board = "--metrics.enable_tensorboard"
    found = pool(2).run(_run, str(rolled), {6: NAN}, *SHORT, "--guard.policy=rollback", board)[0]
    pool(2).run(_run, str(plain), {}, *SHORT, "--training.steps=4")
    other = pool(2).run(_run, str(plain), {}, *SHORT, "--data.skip_steps=5-6")[0]
    assert found["step"] == other["step"] == 12
    assert _losses(found["rows"]) == _losses(other["rows"])
    steps = [row["step"] for row in found["rows"]]
    assert steps == sorted(set(steps)) == list(range(1, 13)), "no step twice"
    (dated,) = (rolled / "tb").iterdir()
    assert [step for step, _ in scalars(dated)["loss_metrics/global_avg_loss"]] == list(range(1, 13))
    state = _loop(rolled / "checkpoint" / "step-12")
    assert state["data"] == {"next_sequence": 14 * GLOBAL, "left_out": [[4 * GLOBAL, 6 * GLOBAL]]}
    assert len(state["guard"]["losses"]) == 6
    # The one thing that differs: the budget.
    assert state["guard"].pop("bad_steps") == [6]
    assert state == _loop(plain / "checkpoint" / "step-12")
    (verdict,) = [line for line in other["said"] if line.startswith("resume verified")]
    assert "the next batch is another one; as allowed: data.skip_steps" in verdict
    step_12 = [Contents(folder / "checkpoint" / "step-12") for folder in (rolled, plain)]
    assert [difference.name for difference in compare(*step_12) if difference.elements] == []
    (event,) = found["events"]
    assert event["action"] == "rollback" and event["back_to_step"] == 4 and event["left_out"] == "5-6"
    assert event["documents"] == {str(n): found["documents"][str(n)] for n in range(40, 48)}
    assert any("Rolled back to the checkpoint of step 4, without the data of steps 5-6" in s for s in found["said"])


@pytest.mark.soak
def test_a_run_that_rolled_back_resumes_exactly(pool: Pools, tmp_path: Path) -> None:
    straight, broken = tmp_path / "straight", tmp_path / "broken"
    flags = [*SHORT, "--guard.policy=rollback"]
    pool(2).run(_run, str(straight), {6: NAN}, *flags)
    pool(2).run(_run, str(broken), {6: NAN}, *flags, "--training.steps=8")
    resumed = pool(2).run(_run, str(broken), {}, *flags)[0]
    assert any("resume verified" in line and "the next batch is the one" in line for line in resumed["said"])
    assert _same_checkpoint(straight / "checkpoint" / "step-12", broken / "checkpoint" / "step-12")
    rows = [_losses(read_metrics(folder / "metrics.jsonl")) for folder in (straight, broken)]
    assert rows[0] == rows[1]


@pytest.mark.slow
def test_rollbacks_end_with_their_budget(pool: Pools, tmp_path: Path) -> None:
    poison = {6: NAN, 8: NAN, 11: NAN}
    flags = [*SHORT, "--guard.policy=rollback", "--checkpoint.async_mode=async"]
    found = pool(2).run(_run, str(tmp_path), poison, *flags)[0]
    assert [(e["step"], e["action"], e["data_steps"]) for e in found["events"]] == [
        (6, "rollback", "6"),
        (6, "rollback", "8"),
        (7, "stop", "11"),
    ]
    assert found["code"] == exit_codes.GUARD
    assert "guard.max_skips = 2 within 6 steps (guard.window) is used up; bad were the steps 6, 6, 7" in found["error"]


@pytest.mark.slow
def test_a_checkpoint_with_bad_weights_is_left_for_the_one_before(pool: Pools, tmp_path: Path) -> None:
    """Whatever is read behind the checkpoint of step 4, step 5 or 6 is bad, until the run goes on from step 2."""
    poison = dict.fromkeys((5, 7, 8), NAN)  # in the data order: each time another stretch
    flags = ["--checkpoint.interval=2", "--training.steps=8", "--guard.policy=rollback"]
    found = pool(2).run(_run, str(tmp_path), poison, *flags)[0]
    assert [(e["step"], e["back_to_step"], e["left_out"]) for e in found["events"]] == [
        (5, 4, "5"),
        (6, 4, "5-7"),
        (5, 2, "3-8"),
    ]
    assert found["step"] == 8 and [row["step"] for row in found["rows"]] == list(range(1, 9)), "no step twice"
    root = tmp_path / "checkpoint"
    why = (root / "step-4.invalid-0" / "invalid.txt").read_text()
    assert "gone back to it 2 times" in why and "the last time step 5" in why
    assert any("step-4 is now step-4.invalid-0: its weights are not trusted" in line for line in found["said"])
    assert sorted(path.name for path in root.iterdir()) == ["step-2", "step-4", "step-4.invalid-0", "step-6", "step-8"]
    assert _loop(root / "step-4")["data"] == {"next_sequence": 10 * GLOBAL, "left_out": [[2 * GLOBAL, 8 * GLOBAL]]}
    (end,) = [entry for entry in read_entries(tmp_path) if entry["event"] == "end"]
    assert (end["state"], end["saved_step"], end["lost_steps"]) == ("done", 8, 0)


@pytest.mark.slow
def test_the_only_checkpoint_is_gone_back_to_until_the_budget_is_used_up(pool: Pools, tmp_path: Path) -> None:
    poison = dict.fromkeys(range(5, 13), NAN)
    flags = ["--checkpoint.interval=4", "--training.steps=8", "--guard.policy=rollback", "--guard.max_skips=4"]
    found = pool(2).run(_run, str(tmp_path), poison, *flags)[0]
    assert [e.get("back_to_step") for e in found["events"]] == [4, 4, 4, 4, None]
    assert found["code"] == exit_codes.GUARD and "guard.max_skips = 4" in found["error"]
    assert sorted(path.name for path in (tmp_path / "checkpoint").iterdir()) == ["step-4"]


@pytest.mark.slow
def test_without_a_checkpoint_there_is_nothing_to_go_back_to(pool: Pools, tmp_path: Path) -> None:
    found = pool(2).run(_run, str(tmp_path), {2: NAN}, *SHORT, "--guard.policy=rollback")[0]
    assert found["code"] == exit_codes.GUARD and found["at"] == 2
    assert "nothing to go back to" in found["error"] and "has no valid checkpoint" in found["error"]


@pytest.mark.soak
def test_a_spike_is_found_alike_after_a_resume(pool: Pools, tmp_path: Path) -> None:
    """The window is needed for it: six losses of which four are from before the resume."""
    flags = [*SHORT, "--guard.policy=skip", "--checkpoint.interval=12"]
    straight, broken = tmp_path / "straight", tmp_path / "broken"
    found = pool(2).run(_run, str(straight), {9: 50.0}, *flags)[0]
    pool(2).run(_run, str(broken), {}, *flags, "--training.steps=8")
    resumed = pool(2).run(_run, str(broken), {9: 50.0}, *flags)[0]
    (event,), (again,) = found["events"], resumed["events"]
    assert event["kind"] == again["kind"] == "spike" and event["step"] == again["step"] == 9
    assert event["message"] == again["message"] and "the loss jumped over" in event["message"]
    assert _losses(found["rows"]) == _losses(resumed["rows"])
    assert _same_checkpoint(straight / "checkpoint" / "step-12", broken / "checkpoint" / "step-12")


@pytest.mark.slow
def test_steps_left_out_too_late_are_told(pool: Pools, tmp_path: Path) -> None:
    pool(1).run(_run, str(tmp_path), {}, *SHORT, "--training.steps=4", "--data.skip_steps=2")
    found = pool(1).run(_run, str(tmp_path), {}, *SHORT, "--training.steps=6", "--data.skip_steps=2,4-7")[0]
    (line,) = [line for line in found["said"] if line.startswith("data.skip_steps")]
    assert line.startswith("data.skip_steps: 4-5 comes too late, it was trained on before this checkpoint")
    state = Contents(tmp_path / "checkpoint" / "step-6").manifest.train
    assert state["data"] == {"next_sequence": 9 * GLOBAL, "left_out": [[8, 16], [40, 56]]}


@pytest.mark.slow
def test_runs_in_epochs_end_sooner(pool: Pools, tmp_path: Path) -> None:
    text = tmp_path / "text.jsonl"
    records = ({"text": f"Verse {n}: and the word was number {n * n}.", "timestamp": "", "url": ""} for n in range(60))
    text.write_text("\n".join(map(json.dumps, records)))
    flags = ["--training.epochs=1", f"--training.dataset_path={text}", "--no-checkpoint.enable_checkpoint"]
    whole = pool(1).run(_in_epochs, str(tmp_path / "whole"), *flags)[0]
    less = pool(1).run(_in_epochs, str(tmp_path / "less"), *flags, "--data.skip_steps=2-3")[0]
    assert whole[0] - less[0] == 2 and less[1] == less[0], "planned and done"


def _in_epochs(world: World, folder: str, *flags: str) -> tuple[int, int]:
    from titanlite.config.load import load_file
    from titanlite.prepare import resolve_plans

    config = load_file("debug_model.toml", [*TINY, "--no-validation.enable", f"--job.dump_folder={folder}", *flags])
    text = read_text(resolve_plans(config, world.size))
    plans = resolve_plans(config, world.size, text.train.total_sequences)
    trainer = Trainer(plans, world, text)
    trainer.train()
    assert plans.train.steps is not None
    return plans.train.steps, trainer.step


@pytest.mark.slow
def test_a_step_after_a_rollback_is_not_taken_for_the_one_after_the_checkpoint(pool: Pools, tmp_path: Path) -> None:
    """The step after the checkpoint is bad, and done again with other text; then the run ends before it saves."""
    flags = [*SHORT, "--guard.policy=rollback", "--guard.max_skips=1"]
    found = pool(1).run(_run, str(tmp_path), {5: NAN, 7: NAN}, *flags)[0]
    assert [event["action"] for event in found["events"]] == ["rollback", "stop"] and found["at"] == 6
    resumed = pool(1).run(_run, str(tmp_path), {}, *flags, "--training.steps=6")[0]
    (verdict,) = [line for line in resumed["said"] if "verified" in line.lower()]
    assert verdict.startswith("resume verified at step 4") and "no earlier attempt has left figures" in verdict


@pytest.mark.slow
def test_weights_that_make_every_step_bad_do_not_push_out_the_last_good_ones(pool: Pools, tmp_path: Path) -> None:
    """The steps after 4 are all skipped, whatever the text: what is saved then was never proven."""
    flags = ["--training.steps=9", "--guard.policy=skip", "--guard.max_skips=9", "--checkpoint.interval=2"]
    poison = dict.fromkeys(range(5, 12), NAN)
    found = pool(2).run(_run, str(tmp_path), poison, *flags, "--checkpoint.keep_latest_k=2")[0]
    assert [event["step"] for event in found["events"]] == [5, 6, 7, 8, 9]
    assert steps_in(tmp_path / "checkpoint") == [2, 4, 6, 8, 9], "2 is the newest of which later steps were good"


def _drifts(world: World, folder: str) -> list[bool]:
    """At each measurement of drift, whether nothing is under way any more that its pause would pay for."""
    flags = [*TINY, "--no-validation.enable", f"--job.dump_folder={folder}", "--training.steps=3"]
    plans = load_plans("debug_model.toml", world.size, flags)
    trainer = Trainer(plans, world, read_text(plans))
    guard = trainer.guard = LateGuard(world.device, plans.guard)
    settled: list[bool] = []

    class Drifts:
        def due(self, step: int) -> bool:
            return True

        def measure(self, batches: Any) -> Float8Error:
            settled.append(guard.behind is None)
            return Float8Error(1.0, 1.0)

    trainer.drift = Drifts()  # type: ignore[assignment]
    trainer.train()
    return settled


def test_drift_is_measured_when_the_step_before_is_done(pool: Pools, tmp_path: Path) -> None:
    assert pool(1).run(_drifts, str(tmp_path)) == [[True] * 3]
