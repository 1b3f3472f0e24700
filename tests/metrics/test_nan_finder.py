"""The first module whose output, or whose gradient, is not finite is named, with the ranks and the
micro-batch.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.support.harness import Run, batches, build_tiny, changed, full, micro_batches
from tests.support.whole_runs import make_trainer
from titanlite.config.sections import ActivationCheckpoint, Compile
from titanlite.dist.dist_env import DistEnv
from titanlite.dist.local_parts import local
from titanlite.loss import cross_entropy_sum
from titanlite.metrics.nan_finder import Finding, diagnose_nonfinite
from titanlite.optim.bad_step_errors import BadStepError
from titanlite.runs.attempts import read_entries

RUN = Run(*batches(2, 8, 16, 192), [1e-3] * 2, accumulation=2)
FEED_FORWARD = "layers.1.feed_forward"
W2 = f"{FEED_FORWARD}.w2"
INFINITY = float("inf")
NAN = float("nan")


class Scale(torch.autograd.Function):
    """Passes its input on, and its gradient times a factor, which may itself be beyond float32."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, factor: float) -> torch.Tensor:
        ctx.root = factor**0.5
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient * ctx.root * ctx.root, None


def _poison(model: torch.nn.Module, where: str) -> None:
    """Make something in the second micro-batch of two not finite."""
    begun: list[int] = []
    model.register_forward_pre_hook(lambda *_: begun.append(1))

    def second() -> bool:
        return len(begun) % 2 == 0

    w2 = model.get_submodule(W2)
    if where == "output":
        w2.register_forward_hook(lambda module, args, out: out / 0 if second() else out)
    elif where == "gradient inside":
        w2.register_forward_pre_hook(
            lambda module, args: (Scale.apply(args[0], NAN),) if second() else args
        )
    elif where == "sum":
        head = model.get_submodule("output")
        head.register_forward_pre_hook(lambda module, args: (Scale.apply(args[0], 1 / 1.5e40),))
        head.register_forward_hook(lambda module, args, out: Scale.apply(out, 1.5e40))
    elif where == "weights":
        local(model.get_parameter(f"{W2}.weight").detach())[0, 0] = INFINITY


def _find(world: DistEnv, run: Run, where: str, **keywords: Any) -> tuple[Finding, str]:
    """Poison the last rank, and look."""
    model, optimizer, rank = build_tiny(world, run)
    if world.rank == world.size - 1:
        _poison(model, where)
        if where == "loss":
            keywords["loss_function"] = lambda logits, labels: (
                cross_entropy_sum(logits, labels) * INFINITY
            )
    if where == "norm":
        keywords["loss_function"] = lambda logits, labels: cross_entropy_sum(logits, labels) * 1e22
    before = {name: full(p) for name, p in model.named_parameters()}
    finding = diagnose_nonfinite(model, micro_batches(run, 0, rank, world.size), **keywords)
    if where != "weights":
        assert all(torch.equal(full(p), before[name]) for name, p in model.named_parameters())
    assert all(p.grad is None for p in model.parameters())
    return finding, str(finding)


EXPECTED = {
    "output": Finding("forward", W2, (1,), 1),
    "loss": Finding("loss", None, (1,)),
    "gradient inside": Finding("backward", f"{FEED_FORWARD}.w3", (1,), 1),
    "weights": Finding("weights", None, (1,), parameters=(f"{W2}.weight",)),
    # Each of two micro-batches has a gradient below float32's largest number.
    "sum": Finding("reduction", None, (0, 1), parameters=("output.weight",)),
    "norm": Finding("nowhere"),  # all gradients are finite, the sum of their squares overflows
    "nowhere": Finding("nowhere"),
}


@pytest.mark.slow_after(2)
@pytest.mark.parametrize("where", EXPECTED)
def test_the_origin_is_named_on_every_rank(pool, where):
    (first, text), (second, _) = pool(2).run(_find, RUN, where)
    assert first == second == EXPECTED[where]
    if first.module:
        assert first.module in text
        assert "rank 1, micro-batch 2" in text


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("where", ["output", "gradient inside"])
def test_it_is_found_in_replicas_that_recompute_compiled_blocks(pool, where):
    activations = ActivationCheckpoint(mode="selective", selective_ac_option="op")
    compile = Compile(components=["model"], backend="eager")
    run = replace(RUN, replicas=2, activations=activations, compile=compile)
    run = replace(run, training=changed(RUN.training, gradient_sync="every"))
    found = pool(2).run(_find, run, where, sync_every=True)
    assert [finding for finding, _ in found] == [EXPECTED[where]] * 2


def _stopped(world: DistEnv, folder: str) -> str:
    flags = ["--no-checkpoint.enable_checkpoint", "--no-validation.enable", "--training.steps=6"]
    trainer = make_trainer(world, folder, *flags)

    def spoil(module: Any, args: Any, out: torch.Tensor) -> torch.Tensor:
        return out * NAN if trainer.step == 3 and world.rank == 1 else out

    trainer.parts.model.get_submodule(W2).register_forward_hook(spoil)
    with pytest.raises(BadStepError) as stopped:
        trainer.train()
    return str(stopped.value)


def test_the_guards_error_says_where_it_came_from(pool, tmp_path):
    first, second = pool(2).run(_stopped, str(tmp_path))
    assert first == second
    assert first.startswith("step 3: loss nan")
    assert "not finite on rank 1" in first
    assert (
        f"first not finite: the output of {W2}, in the forward pass (rank 1, micro-batch 1)"
        in first
    )
    end = read_entries(tmp_path)[-1]
    assert (end["event"], end["state"], end["reason"]) == ("end", "stopped", first)
