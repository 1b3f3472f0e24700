"""Weights that get no gradient are named; others are not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor

from tests.support.pool import Pools
from tests.support.whole_runs import make_trainer, outcome_of
from titanlite.callbacks import Callback, Callbacks, RunEnd
from titanlite.dist.dist_env import DistEnv
from titanlite.metrics import dead_weights
from titanlite.trainer import Trainer
from titanlite.utils import logger

LOST = "layers.0.feed_forward.w1.weight"
SHORT = ("--training.steps=4", "--metrics.log_freq=3", "--no-validation.enable")


class LoseGradient(Callback):
    """Sets gradients to zero, on some ranks."""

    def __init__(self, names: set[str], ranks: set[int]) -> None:
        self.names, self.ranks = names, ranks

    def before_update(self, trainer: Trainer) -> None:
        if trainer.parts.world.rank not in self.ranks:
            return
        for name, parameter in trainer.parts.model.named_parameters():
            if name in self.names and parameter.grad is not None:
                parameter.grad.zero_()


class BeginAtZero(Callback):
    """Sets the last weights to zero before the first step: then all others have no gradient."""

    @torch.no_grad()
    def on_start(self, trainer: Trainer) -> None:
        weight = dict(trainer.parts.model.named_parameters())["output.weight"]
        local = weight.to_local() if isinstance(weight, DTensor) else weight
        local.zero_()


def warnings_of(world: DistEnv, folder: str, own: list[Callback], *flags: str) -> list[str]:
    trainer = make_trainer(world, folder, *SHORT, *flags)
    trainer.callbacks = Callbacks([*own, *trainer.callbacks.all])
    found: dict[str, Any] = outcome_of(trainer, folder)
    assert found["step"] == 4
    return [line for line in found["said"] if "no gradient has reached" in line]


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("flags", [(), ("--optimizer.name=Muon",)], ids=["adamw", "muon"])
def test_a_weight_without_a_gradient_is_named_once(
    pool: Pools, tmp_path: Path, flags: tuple[str, ...]
) -> None:
    lose = LoseGradient({LOST}, {0, 1})
    first, second = pool(2).run(warnings_of, str(tmp_path), [lose], *flags)
    assert len(first) == 1
    assert f"no gradient has reached {LOST} in 3 steps" in first[0]
    assert second == []


@pytest.mark.slow
def test_a_part_of_a_weight_may_have_no_gradient(pool: Pools, tmp_path: Path) -> None:
    found = pool(2).run(warnings_of, str(tmp_path), [LoseGradient({LOST}, {1})])
    assert found == [[], []]


def test_weights_behind_zeros_have_no_gradient_in_the_first_step_only(
    pool: Pools, tmp_path: Path
) -> None:
    assert pool(1).run(warnings_of, str(tmp_path), [BeginAtZero()]) == [[]]


def test_a_long_list_is_cut(pool: Pools, tmp_path: Path) -> None:
    names = {f"layers.{n}.attention.w{which}.weight" for n in range(2) for which in "qkv"}
    ((line,),) = pool(1).run(warnings_of, str(tmp_path), [LoseGradient(names, {0})])
    assert "layers.1.attention.wk.weight and 2 more in 3 steps" in line


class CountLooks(Callback):
    """Counts the logs at which weights are looked at."""

    def __init__(self) -> None:
        self.found = 0

    def on_start(self, trainer: Trainer) -> None:
        real = dead_weights._names_with_moments

        def counted(trainer: Trainer) -> Any:
            self.found += 1
            return real(trainer)

        dead_weights._names_with_moments = counted

    def on_end(self, trainer: Trainer, end: RunEnd) -> None:
        logger.info(f"looks: {self.found}")


def looks_of(world: DistEnv, folder: str, *flags: str) -> list[str]:
    real = dead_weights._names_with_moments
    trainer = make_trainer(world, folder, "--training.steps=8", "--metrics.log_freq=1", *flags)
    trainer.callbacks = Callbacks([*trainer.callbacks.all, CountLooks()])
    try:
        said: list[str] = outcome_of(trainer, folder)["said"]
    finally:
        dead_weights._names_with_moments = real
    return [line for line in said if line.startswith("looks: ")]


@pytest.mark.slow
def test_it_looks_once_and_not_for_ever_where_there_is_nothing_to_see(
    pool: Pools, tmp_path: Path
) -> None:
    (once,) = pool(1).run(looks_of, str(tmp_path / "a"))
    sgd = "--optimizer.name=torch.optim:SGD"
    (given_up,) = pool(1).run(looks_of, str(tmp_path / "b"), sgd, "--optimizer.lr=0.01")
    assert (once, given_up) == (["looks: 1"], ["looks: 3"])
