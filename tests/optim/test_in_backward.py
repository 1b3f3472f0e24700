"""Updates in the backward pass: the bits of the usual step, and gradients of one FSDP group at a
time.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.support.checkpoints import unequal
from tests.support.harness import (
    TINY,
    Run,
    batches,
    equal_states,
    full_precision,
    state_of,
    stepper,
)
from tests.support.whole_runs import losses_of
from tests.support.whole_runs import poisoned_run as run_poisoned
from titanlite.checkpoint.manifest import steps_in
from titanlite.config.model_sections import Optimizer, OptimizerGroup
from titanlite.config.sections import Training
from titanlite.dist.dist_env import DistEnv
from titanlite.dist.local_parts import local
from titanlite.optim.in_backward import StepInBackward

RUN = Run(*batches(3, 8, 16, 192), [3e-3] * 3)
GROUPS = Optimizer(
    weight_decay=0.1, groups=[OptimizerGroup(pattern="wq|norm", lr=1e-4, weight_decay=0.0)]
)


def _train(world: DistEnv, run: Run, early: bool) -> dict[str, Any]:
    """Steps with or without updates in the backward; how many bytes of gradients lived at most."""
    model, optimizer, take = stepper(
        world, run, max_norm=1e9, loss_function=run.builder(world).loss()
    )
    parameters = list(model.parameters())
    most = 0
    whole = sum(local(p).nbytes for p in parameters)

    def measure(parameter: torch.Tensor) -> None:
        nonlocal most
        gradients = [local(p.grad).untyped_storage() for p in parameters if p.grad is not None]
        most = max(most, sum({s.data_ptr(): s.nbytes() for s in gradients}.values()))

    for parameter in parameters:
        parameter.register_post_accumulate_grad_hook(measure)
    in_backward = StepInBackward(model, optimizer) if early else None
    results = [take(n + 1, rate, n, in_backward=in_backward) for n, rate in enumerate(run.rates)]
    assert all(p.grad is None for p in parameters)
    return {
        "losses": [result.loss.item() for result in results],
        "norms": [result.grad_norm.item() for result in results],
        "tensors": state_of(model, optimizer),
        "share": most / whole,
    }


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(
    "changes",
    [
        {"settings": GROUPS, "args": replace(TINY, n_layers=6)},
        {"args": replace(TINY, tied=True), "settings": Optimizer(implementation="fused")},
        pytest.param({"tensor": 2}, marks=pytest.mark.slow),
        {
            "settings": Optimizer(name="AnyPrecisionAdamW", kahan=True),
            "training": Training(dtype="bfloat16"),
        },
    ],
    ids=["groups", "tied", "tp", "kahan"],
)
def test_the_bits_are_those_of_the_usual_step_and_gradients_of_one_group_live(pool, changes):
    run = replace(RUN, **{"training": full_precision(), **changes})
    usual, early = (pool(2).run(_train, run, early)[0] for early in (False, True))
    assert early["losses"] == usual["losses"]
    assert early["norms"] == pytest.approx(usual["norms"], rel=1e-5)
    assert equal_states(usual["tensors"], early["tensors"])
    if run.args.n_layers == 6:
        assert usual["share"] == pytest.approx(1.0, abs=0.01) and early["share"] < 0.2, (
            usual,
            early,
        )


EARLY = [
    "--optimizer.early_step_in_backward",
    "--training.max_norm=1e9",
    "--training.global_batch_size=-1",
]


@pytest.mark.slow
def test_a_bad_step_is_undone_by_a_rollback_and_never_saved(pool, tmp_path):
    flags = [*EARLY, "--training.batch_size=4", "--training.steps=6", "--checkpoint.interval=2"]
    stopped = pool(2).run(run_poisoned, str(tmp_path / "stop"), {5: float("nan")}, *flags)[0]
    assert "step 5" in stopped["error"]
    assert steps_in(tmp_path / "stop" / "checkpoint") == [2, 4]
    gone_on = pool(2).run(
        run_poisoned, str(tmp_path / "back"), {5: float("nan")}, *flags, "--guard.policy=rollback"
    )[0]
    assert gone_on["error"] == ""
    assert steps_in(tmp_path / "back" / "checkpoint") == [2, 4, 6]


@pytest.mark.slow
def test_a_resumed_run_keeps_to_the_schedule(pool, tmp_path):
    """Three steps, and three after a resume, are six: the loaded optimizer has new groups, whose
    rates count.
    """
    flags = [*EARLY, "--training.batch_size=4", "--checkpoint.interval=3"]
    straight = pool(2).run(
        run_poisoned, str(tmp_path / "straight"), {}, *flags, "--training.steps=6"
    )[0]
    for steps in (3, 6):
        found = pool(2).run(
            run_poisoned, str(tmp_path / "resumed"), {}, *flags, f"--training.steps={steps}"
        )[0]
    assert losses_of(found["rows"]) == losses_of(straight["rows"])
    assert len(losses_of(found["rows"])) == 6
    folders = (tmp_path / name / "checkpoint" / "step-6" for name in ("straight", "resumed"))
    assert unequal(*folders) == []
