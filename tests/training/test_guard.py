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
from tests.support.pool import Pools
from titanlite.checkpoint.state_dict import find_nonfinite
from titanlite.dist.dist_env import DistEnv
from titanlite.loss import cross_entropy_sum
from titanlite.optim.bad_step_errors import BadStepError
from titanlite.optim.guard import FiniteGuard
from titanlite.parallel.tensor import tensor_loss

CPU = torch.device("cpu")
TOKENS, LABELS = batches(6, 4, 16, 192)
RUN = Run(TOKENS, LABELS, [3e-3] * 6)
BAD = 3
NAN = float("nan")
INF = float("inf")


def _train(
    world: DistEnv, run: Run, policy: Any, where: str, value: float | None
) -> dict[str, Any]:
    """Six steps with `value` in the loss, a gradient or an activation of the third on the last
    rank.

    value: None for five steps, without that batch.
    """
    loss = tensor_loss(cross_entropy_sum) if run.tensor > 1 else cross_entropy_sum
    guard = FiniteGuard(world.device, policy, max_skips=1)
    model, optimizer, take = stepper(world, run, guard=guard, loss_function=loss)
    poison = False

    def spoil_gradient(gradient: torch.Tensor) -> torch.Tensor:
        return (
            gradient.masked_fill(torch.ones_like(gradient, dtype=torch.bool), value)
            if poison
            else gradient
        )

    def spoil(module: Any, inputs: Any, out: torch.Tensor) -> torch.Tensor:
        if not poison:
            return out
        if where == "gradient":
            out.register_hook(spoil_gradient)
            return out
        return out + torch.tensor(value) if where == "loss" else out * torch.tensor(value)

    for name, module in model.named_modules():
        if name.endswith(W2) if where == "activation" else module is model:
            module.register_forward_hook(spoil)
    states: list[dict[str, torch.Tensor]] = []
    skipped: list[tuple[int, list[int]]] = []
    error: BadStepError | None = None
    for step in range(1, 7):
        if value is None and step == BAD:
            continue
        poison = value is not None and step == BAD and world.rank == world.size - 1
        take(step, 3e-3, step - 1, pipeline=run_stages(model, run, world, loss))
        states.append(state_of(model, optimizer))
        try:
            if error is None:
                guard.poll()
        except BadStepError as caught:
            error = caught
        skipped += [(bad.step, bad.ranks) for bad in guard.skipped()]
    told = None if error is None else (error.step, error.done, error.ranks, str(error))
    return {"states": states, "skipped": skipped, "error": told}


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(
    ("implementation", "where", "value"),
    [("fused", "gradient", NAN), ("foreach", "loss", NAN), ("for-loop", "gradient", INF)],
)
def test_poison_on_one_rank_stops_all_and_reaches_no_weight(
    pool: Pools, implementation: str, where: str, value: float
) -> None:
    results = pool(2).run(_train, replace(RUN, implementation=implementation), "stop", where, value)
    for result in results:
        states = result["states"]
        assert not equal_states(states[0], states[1]), "healthy steps must train"
        assert all(equal_states(state, states[BAD - 2]) for state in states[BAD - 1 :]), (
            "the bad step, and all after it"
        )
        assert result["error"] == results[0]["error"], "all ranks stop alike"
        assert result["error"][:3] == (BAD, BAD - 1, [1] if where == "loss" else [])
        assert ("backward pass" in result["error"][3]) == (where == "gradient")


def _spread(**changes: Any) -> Any:
    return pytest.param(replace(RUN, **changes), NAN, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    ("run", "value"),
    [
        (replace(RUN, implementation="foreach"), NAN),
        _spread(tensor=2, accumulation=2),
        _spread(context=2),
        _spread(pipeline=2),
    ],
    ids=["foreach", "tensor", "context", "pipeline"],
)
def test_a_skipped_step_leaves_no_trace(pool: Pools, run: Run, value: float) -> None:
    without = pool(2).run(_train, run, "skip", "activation", None)
    for found, other in zip(
        pool(2).run(_train, run, "skip", "activation", value), without, strict=True
    ):
        states = found["states"]
        assert [step for step, _ in found["skipped"]] == [BAD]
        assert equal_states(states[BAD - 1], states[BAD - 2]), (
            "weights, moments and step count stay bit for bit"
        )
        assert not equal_states(states[BAD], states[BAD - 1]), "the step after it trains"
        assert equal_states(states[-1], other["states"][-1]), "as if the batch had never been there"


def _zero_probability(world: DistEnv) -> tuple[bool, int]:
    guard = FiniteGuard(world.device)
    model, _, take = stepper(world, RUN, guard=guard)
    target = next(int(t) for t in LABELS[0].flatten() if t >= 0)
    model.register_forward_hook(
        lambda module, inputs, logits: logits.masked_fill(
            torch.arange(logits.shape[-1]) == target, -INF
        )
    )
    result = take(1)
    with pytest.raises(BadStepError) as caught:
        guard.poll()
    return bool(result.grad_norm.isfinite()), caught.value.step


def test_infinite_loss_with_finite_gradients_is_caught(pool: Pools) -> None:
    """A target of probability zero has loss infinity, but a finite gradient: the norm alone would
    miss it.
    """
    assert pool(1).run(_zero_probability) == [(True, 1)]


def test_on_a_gpu_a_step_is_known_when_the_next_is_under_way() -> None:
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


def _noisy(seed: int, steps: int) -> list[float]:
    """Losses that fall and jitter, with jumps here and there."""
    draw = random.Random(seed)
    losses = [8 * 0.97**n + draw.gauss(0, 0.05) for n in range(steps)]
    return [loss + (draw.uniform(0.1, 3) if draw.random() < 0.08 else 0) for loss in losses]


@pytest.mark.parametrize(("sigmas", "window"), [(3.0, 12), (1.5, 7), (6.0, 30)])
def test_spikes_are_those_of_the_formula(sigmas: float, window: int) -> None:
    """Against mean and sample deviation of Python's own over the last losses that were not
    flagged.
    """
    guard = FiniteGuard(CPU, "skip", 149, sigmas, 150)
    guard._losses = type(guard._losses)(window, sigmas, CPU)  # type: ignore[misc]
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
    assert flagged == [bad.step for bad in guard.skipped()]
    assert 2 < len(flagged) < 100


def test_statistics_survive_json_and_decide_alike_to_the_last_bit() -> None:
    losses = _noisy(8, 300)
    straight = FiniteGuard(CPU, "skip", 29, 2.0, 30)
    decisions = [_feed(straight, step, loss) for step, loss in enumerate(losses, 1)]
    assert decisions.count(False) > 5
    broken = FiniteGuard(CPU, "skip", 29, 2.0, 30)
    for step, loss in enumerate(losses, 1):
        if step % 7 == 0:
            saved = json.dumps(broken.state_dict())
            broken = FiniteGuard(CPU, "skip", 29, 2.0, 30)
            broken.load_state_dict(json.loads(saved))
        assert _feed(broken, step, loss) == decisions[step - 1]
    assert broken.state_dict() == straight.state_dict()


def test_the_budget_is_of_the_last_steps() -> None:
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
    def found(*tensors: torch.Tensor) -> str:
        return find_nonfinite({f"t{i}": tensor for i, tensor in enumerate(tensors)})

    def one(value: float, dtype: torch.dtype, rank: int = 1) -> torch.Tensor:
        tensor = torch.ones(1000, dtype=dtype)
        tensor[777] = value if world.rank == rank else 1.0
        return tensor

    whole = torch.ones(3, dtype=torch.int64)
    largest = [
        torch.full((100,), torch.finfo(t).max, dtype=t)
        for t in (torch.float16, torch.bfloat16, torch.float32)
    ]
    return [
        found(whole, torch.empty(0), *largest, torch.ones(3, dtype=torch.float64) * 1e300),
        *(
            found(whole, *largest, one(NAN, t))
            for t in (torch.float16, torch.bfloat16, torch.float32, torch.float64)
        ),
        found(one(-INF, torch.float32), one(NAN, torch.float32)),
        found(one(1.0, torch.float32), one(NAN, torch.float32, rank=0)),
        found(torch.tensor([INF, -INF])),
    ]


def test_the_search_finds_what_is_not_finite_and_nothing_else(pool: Pools) -> None:
    for found in pool(2).run(_search):
        assert found == [
            "",
            *["t4 on rank 1"] * 4,
            "t0 on rank 1",
            "t1 on rank 0",
            "t0 on ranks 0, 1",
        ]
