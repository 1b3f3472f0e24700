"""Weights that several ranks hold are compared at the first log; those that differ are named."""

from __future__ import annotations

import pytest
import torch

from tests.support.grid import DEEPSEEK
from tests.support.whole_runs import make_trainer, outcome_of
from titanlite.callbacks import Callback, Callbacks
from titanlite.dist.dist_env import DistEnv
from titanlite.dist.local_parts import local
from titanlite.trainer import Trainer

SHORT = ("--training.steps=1", "--no-validation.enable", "--no-checkpoint.enable_checkpoint")
REPLICATE = "--training.data_parallel_replicate_degree=2"
TENSOR = "--training.tensor_parallel_degree=2"
CONTEXT = "--experimental.context_parallel_degree=2"
PIPELINE = "--experimental.pipeline_parallel_degree=2"
#: Two blocks of experts whose biases move.
EXPERTS = (
    *(f"--{key}={value}" for key, value in DEEPSEEK.items()),
    "--model.overrides.bias_update=0.001",
    "--parallelism.expert_parallel_degree=2",
)
BIAS = "layers.1.feed_forward.expert_bias"


class Nudge(Callback):
    """Moves a weight or a bias on some ranks alone."""

    def __init__(self, name: str, ranks: set[int]) -> None:
        self.name, self.ranks = name, ranks

    @torch.no_grad()
    def on_start(self, trainer: Trainer) -> None:
        tensor = trainer.parts.model.state_dict()[self.name]
        if trainer.parts.world.rank in self.ranks:
            local(tensor).add_(0.001)


def warnings_of(world: DistEnv, folder: str, own: list[Callback], *flags: str) -> list[str]:
    trainer = make_trainer(world, folder, *SHORT, *flags)
    trainer.callbacks = Callbacks([*own, *trainer.callbacks.all])
    said: list[str] = outcome_of(trainer, folder)["said"]
    return [line for line in said if "WEIGHTS DIFFER" in line]


@pytest.mark.parametrize(
    ("flags", "name"),
    [((TENSOR,), "layers.1.ffn_norm.weight"), ((REPLICATE,), "layers.1.feed_forward.w1.weight")],
    ids=["tensor", "replicas"],
)
def test_a_weight_that_differs_is_named_with_its_ranks(pool, tmp_path, flags, name):
    (line,), second = pool(2).run(warnings_of, str(tmp_path), [Nudge(name, {1})], *flags)
    assert second == []
    assert f"at step 1 between rank 0 and rank 1, which must hold the same: {name}. " in line


@pytest.mark.slow_after(2)
@pytest.mark.parametrize(
    ("ranks", "flags"),
    [(2, (TENSOR,)), (2, (PIPELINE,)), (4, (CONTEXT, REPLICATE)), (4, (*EXPERTS, REPLICATE))],
    ids=["tp", "pp", "cp, ddp", "ep, hsdp"],
)
def test_weights_that_agree_are_not_named(pool, tmp_path, ranks, flags):
    assert pool(ranks).run(warnings_of, str(tmp_path), [], *flags) == [[]] * ranks


@pytest.mark.slow
def test_a_bias_of_experts_is_compared_too(pool, tmp_path):
    (line,), *others = pool(4).run(warnings_of, str(tmp_path), [Nudge(BIAS, {2, 3})], *EXPERTS)
    assert others == [[]] * 3
    assert f"between ranks 0, 1 and ranks 2, 3, which must hold the same: {BIAS}. " in line
