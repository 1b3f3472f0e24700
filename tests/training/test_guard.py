"""A non-finite loss or gradient on one rank: no rank's weights move, all stop alike, the culprit is named."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.pool import Pools
from tests.training.harness import Run, batches, build_tiny, full, micro_batches
from titanlite.build import to_device
from titanlite.guard import FiniteGuard, NonFiniteError
from titanlite.parallel.dist_env import DistEnv
from titanlite.step import train_step

TOKENS, LABELS = batches(6, 4, 16, 192)
RUN = Run(TOKENS, LABELS, [3e-3] * 6)
BAD_STEP = 3


def _state(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    weights = {n: full(p) for n, p in model.named_parameters()}
    moments = {f"{n}.{k}": full(v) for n, p in model.named_parameters() for k, v in optimizer.state[p].items()}
    return {**weights, **moments}


def _poisoned(world: DistEnv, run: Run, where: str, value: float) -> dict[str, Any]:
    """Six steps with `value` put into rank 1's loss or gradient in step 3; the state before and after it."""
    model, optimizer, rank = build_tiny(world, run)
    guard = FiniteGuard(world.device)
    poison = False

    def spoil_gradient(gradient: torch.Tensor) -> torch.Tensor:
        return gradient.masked_fill(torch.ones_like(gradient, dtype=torch.bool), value) if poison else gradient

    def spoil_logits(module: Any, inputs: Any, logits: torch.Tensor) -> torch.Tensor:
        if not poison:
            return logits
        if where == "gradient":
            logits.register_hook(spoil_gradient)
            return logits
        return logits + torch.tensor(value)

    model.register_forward_hook(spoil_logits)
    states: list[dict[str, torch.Tensor]] = []
    error: NonFiniteError | None = None
    for step in range(1, 7):
        poison = step == BAD_STEP and world.rank == world.size - 1
        data = to_device(micro_batches(run, step - 1, rank, world.size), world.device)
        train_step(model, optimizer, data, step=step, lr=3e-3, max_norm=1.0, guard=guard)
        states.append(_state(model, optimizer))
        if error is None:
            try:
                guard.watch()
            except NonFiniteError as caught:
                error = caught
    assert error is not None
    unchanged = [all(torch.equal(states[i][name], states[BAD_STEP - 2][name]) for name in states[i]) for i in range(6)]
    return {
        "message": str(error),
        "step": error.step,
        "ranks": error.ranks,
        "unchanged": unchanged,
        "moved": any(not torch.equal(states[0][n], states[1][n]) for n in states[0]),
    }


@pytest.mark.parametrize("implementation", ["fused", "foreach", "for-loop"])
@pytest.mark.parametrize(
    ("where", "value"), [("gradient", float("nan")), ("gradient", float("inf")), ("loss", float("nan"))]
)
def test_poison_on_one_rank_reaches_no_weight(pool: Pools, implementation: str, where: str, value: float) -> None:
    results = pool(2).run(_poisoned, replace(RUN, implementation=implementation), where, value)
    assert results[0]["message"] == results[1]["message"]
    for result in results:
        assert result["moved"], "healthy steps must train"
        assert result["unchanged"][BAD_STEP - 1 :] == [True] * 4, "the bad step, and all after it, change nothing"
        assert result["step"] == BAD_STEP
        if where == "loss":
            assert result["ranks"] == [1] and "not finite on rank 1." in result["message"]
        else:
            assert result["ranks"] == [] and "arose in the backward pass" in result["message"]
        assert f"weights are those after step {BAD_STEP - 1}" in result["message"]


def test_infinite_loss_with_finite_gradients_is_caught(pool: Pools) -> None:
    """A target of probability zero has loss infinity, but a finite gradient: the norm alone would miss it."""
    (result,) = pool(1).run(_zero_probability)
    assert result["norm_is_finite"] and result["step"] == 1


def _zero_probability(world: DistEnv) -> dict[str, Any]:
    model, optimizer, rank = build_tiny(world, RUN)
    guard = FiniteGuard(world.device)
    data = to_device(micro_batches(RUN, 0, rank, world.size), world.device)
    target = next(int(t) for t in data[0].labels.flatten() if t >= 0)

    def forbid(module: Any, inputs: Any, logits: torch.Tensor) -> torch.Tensor:
        barred = torch.zeros(logits.shape[-1], dtype=torch.bool)
        barred[target] = True
        return logits.masked_fill(barred, float("-inf"))

    model.register_forward_hook(forbid)
    result = train_step(model, optimizer, data, step=1, lr=3e-3, max_norm=1.0, guard=guard)
    try:
        guard.watch()
    except NonFiniteError as error:
        return {"norm_is_finite": bool(result.norm.isfinite()), "step": error.step}
    raise AssertionError("not caught")
