"""A bad step reaches no weight on any rank, whatever the policy; spikes are found as the formula
says.
"""

from __future__ import annotations

import json
import random
import statistics
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.support.harness import W2, Run, batches, equal_states, run_stages, state_of, stepper
from titanlite.checkpoint.state_dict import find_nonfinite
from titanlite.dist.dist_env import DistEnv
from titanlite.loss import cross_entropy_sum
from titanlite.optim.bad_step_errors import BadStepError
from titanlite.optim.guard import FiniteGuard
from titanlite.parallel.tensor import tensor_loss

CPU = torch.device("cpu")
RUN = Run(*batches(6, 4, 16, 192), [3e-3] * 6)
BAD = 3
NAN = float("nan")
INF = float("inf")


def _train(world: DistEnv, run: Run, left_out: bool) -> dict[str, Any]:
    """Six steps with a NaN in an activation of the third on the last rank.

    left_out: five steps, without that batch.
    """
    loss = tensor_loss(cross_entropy_sum) if run.tensor > 1 else cross_entropy_sum
    guard = FiniteGuard(world.device, "skip", max_skips=1)
    model, optimizer, take = stepper(world, run, guard=guard, loss_function=loss)
    poison = False

    def spoil(module: Any, inputs: Any, out: torch.Tensor) -> torch.Tensor:
        return out * NAN if poison else out

    for name, module in model.named_modules():
        if name.endswith(W2):
            module.register_forward_hook(spoil)
    states: list[dict[str, torch.Tensor]] = []
    skipped: list[int] = []
    for step in range(1, 7):
        if left_out and step == BAD:
            continue
        poison = not left_out and step == BAD and world.rank == world.size - 1
        take(step, 3e-3, step - 1, pipeline=run_stages(model, run, world, loss))
        states.append(state_of(model, optimizer))
        guard.poll()
        skipped += [bad.step for bad in guard.skipped()]
    return {"states": states, "skipped": skipped}


@pytest.mark.slow_after(2)
@pytest.mark.parametrize(
    "changes",
    [
        {"implementation": "fused"},
        {"implementation": "foreach"},
        {"implementation": "for-loop"},
        {"tensor": 2, "accumulation": 2},
        {"context": 2},
        {"pipeline": 2},
    ],
    ids=str,
)
def test_a_skipped_step_leaves_no_trace(pool, changes):
    run = replace(RUN, **changes)
    without = pool(2).run(_train, run, True)
    for found, other in zip(pool(2).run(_train, run, False), without, strict=True):
        states = found["states"]
        assert found["skipped"] == [BAD]
        assert equal_states(states[BAD - 1], states[BAD - 2]), (
            "weights, moments and step count stay bit for bit"
        )
        assert not equal_states(states[BAD], states[BAD - 1]), "the step after it trains"
        assert equal_states(states[-1], other["states"][-1]), "as if the batch had never been there"


def test_on_a_gpu_a_step_is_known_when_the_next_is_under_way():
    guard = FiniteGuard(CPU, spike_sigmas=3.0, window=4)
    guard.late = True
    for step in range(1, 9):
        _feed(guard, step, 2.0)
    assert not _feed(guard, 9, 9.0), "the update is held back at once"
    with pytest.raises(BadStepError) as caught:
        _feed(guard, 10, 2.0)
    assert caught.value.step == 9
    two = torch.tensor(2.0)
    assert not guard.check(11, two, two, two), "nothing updates any more"
    guard.load_state_dict({})
    assert _feed(guard, 5, 2.0), "until a checkpoint is loaded"


# Spikes and the budget, by numbers alone


def _feed(guard: FiniteGuard, step: int, loss: float) -> bool:
    """One step with this loss; whether it may update."""
    value = torch.tensor(loss)
    ok = bool(guard.check(step, torch.tensor(1.0), value, value))
    guard.poll()
    return ok


def _noisy() -> list[float]:
    """150 losses that fall and jitter, with jumps here and there."""
    draw = random.Random(5)
    losses = [8 * 0.97**n + draw.gauss(0, 0.05) for n in range(150)]
    return [loss + (draw.uniform(0.1, 3) if draw.random() < 0.08 else 0) for loss in losses]


@pytest.mark.parametrize(("sigmas", "window"), [(3.0, 12), (1.5, 7), (6.0, 30)])
def test_spikes_are_those_of_the_formula(sigmas, window):
    """Against mean and sample deviation of Python's own over the last losses that were not
    flagged.
    """
    guard = FiniteGuard(CPU, "skip", 149, sigmas, 150)
    guard._losses = type(guard._losses)(window, sigmas, CPU)  # type: ignore[misc]
    kept: list[float] = []
    flagged = []
    for step, loss in enumerate(_noisy(), 1):
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
    assert flagged == [bad.step for bad in guard.skipped()]
    assert 2 < len(flagged) < 100


@pytest.mark.parametrize(
    ("norm", "loss", "good"), [(1.0, 2.0, True), (1.0, INF, False), (NAN, 2.0, False)]
)
def test_neither_the_loss_nor_the_norm_alone_is_enough(norm, loss, good):
    """A target of probability zero has an infinite loss, but a finite gradient."""
    value = torch.tensor(loss)
    assert bool(FiniteGuard(CPU).check(1, torch.tensor(norm), value, value)) == good


def test_the_budget_is_of_the_last_steps():
    guard = FiniteGuard(CPU, "skip", 2, 4.0, 10)
    bad_steps = (18, 22, 29, 33, 37)
    for step in range(1, 37):
        assert _feed(guard, step, 9.0 if step in bad_steps else 2.0) == (step not in bad_steps)
    saved = json.loads(json.dumps(guard.state_dict()))
    assert saved["bad_steps"] == [29, 33]
    guard = FiniteGuard(CPU, "skip", 2, 4.0, 10)
    guard.load_state_dict(saved)
    with pytest.raises(BadStepError, match=r"guard\.max_skips = 2 within 10 steps .*29, 33, 37"):
        _feed(guard, 37, 9.0)


# Weights


def _search(world: DistEnv) -> list[str]:
    kinds = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
    good = {"whole": torch.ones(3, dtype=torch.int64), "empty": torch.empty(0)}
    good |= {str(t): torch.full((100,), torch.finfo(t).max, dtype=t) for t in kinds}
    found = [find_nonfinite(good)]
    for kind in kinds:
        tensor = torch.ones(1000, dtype=kind)
        tensor[777] = NAN if world.rank == 1 else 1.0
        found.append(find_nonfinite({**good, "bad": tensor}))
    return [*found, find_nonfinite({**good, "bad": torch.tensor([INF, -INF])})]


def test_the_search_finds_what_is_not_finite_and_nothing_else(pool):
    for found in pool(2).run(_search):
        assert found == ["", *["bad on rank 1"] * 4, "bad on ranks 0, 1"]
