"""Updates in the backward pass: the bits of the usual step, and gradients of one FSDP group at a
time.
"""

from __future__ import annotations

import re
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
from tests.support.whole_runs import losses_of, poisoned_run, train_run
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
    "--training.batch_size=4",
    "--training.global_batch_size=-1",
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("policy", "error", "saved"), [("stop", ".*step 5.*", [2, 4]), ("rollback", "", [2, 4, 6])]
)
def test_a_bad_step_is_undone_by_a_rollback_and_never_saved(pool, tmp_path, policy, error, saved):
    flags = [*EARLY, "--training.steps=6", "--checkpoint.interval=2", f"--guard.policy={policy}"]
    found = pool(2).run(poisoned_run, str(tmp_path), {5: float("nan")}, *flags)[0]
    assert re.fullmatch(error, found["error"], re.DOTALL)
    assert steps_in(tmp_path / "checkpoint") == saved


@pytest.mark.slow
def test_a_resumed_run_keeps_to_the_schedule(pool, tmp_path):
    """Three steps, and three after a resume, are six: the loaded optimizer has new groups, whose
    rates count.
    """
    losses = {}
    for name, steps in (("straight", 6), ("resumed", 3), ("resumed", 6)):
        flags = [*EARLY, "--checkpoint.interval=3", "--no-validation.enable"]
        flags.append(f"--training.steps={steps}")
        rows = pool(2).run(train_run, str(tmp_path / name), *flags)[0]["rows"]
        losses[name] = losses_of(rows)
    assert losses["resumed"] == losses["straight"]
    assert len(losses["resumed"]) == 6
    folders = (tmp_path / name / "checkpoint" / "step-6" for name in losses)
    assert unequal(*folders) == []
