"""A rank gets the random generators of its place in the mesh, and new ones where places changed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.support.checkpoints import RUN, sign, train
from tests.support.whole_runs import make_trainer
from titanlite.dist.dist_env import DistEnv

FSDP: dict[str, Any] = {}
TENSOR = {"tensor": 2}
LINE = "in another mesh: the data order continues exactly, the random generators start afresh"


def _fresh(rank: int) -> float:
    """The first number that a rank draws with the generators that it begins with."""
    return torch.rand((), generator=torch.Generator().manual_seed(100 + rank)).item()


@pytest.mark.slow_after(2)
@pytest.mark.parametrize(
    ("before", "after", "older", "continues"),
    [
        (FSDP, TENSOR, {}, False),
        # It does not tell the places of its ranks.
        (TENSOR, TENSOR, {"config": {}}, False),
        (TENSOR, TENSOR, {}, True),
        (FSDP, {"replicas": 2}, {}, True),
    ],
    ids=str,
)
def test_generators_continue_where_each_rank_keeps_its_place(
    pool, tmp_path, before, after, older, continues
):
    saved = pool(2).run(train, replace(RUN, **before), tmp_path, 1, 1, draw=True)
    if older:
        sign(tmp_path / "step-1", **older)
    loaded = pool(2).run(train, replace(RUN, **after), tmp_path, 2, 2, draw=True)
    for rank in range(2):
        assert saved[rank]["draws"] == [_fresh(rank)]
        assert (loaded[rank]["draws"] != [_fresh(rank)]) == continues
        assert any(LINE in notice for notice in loaded[rank]["loaded"].notices) != continues


def _drawn(world: DistEnv, folder: str, *flags: str) -> float:
    trainer = make_trainer(world, folder, "--training.steps=2", "--no-validation.enable", *flags)
    torch.rand(3)
    trainer.train()
    return torch.rand(()).item()


@pytest.mark.slow
def test_tensor_parallel_ranks_that_take_over_agree(pool, tmp_path):
    first, second = pool(2).run(_drawn, str(tmp_path / "a"))
    assert first != second
    more = ("--training.steps=3", "--training.tensor_parallel_degree=2")
    resumed = pool(2).run(_drawn, str(tmp_path / "a"), *more)
    source = f"--checkpoint.initial_load_path={tmp_path}/a/checkpoint/step-2"
    whole = "--no-checkpoint.initial_load_model_only"
    begun = pool(2).run(_drawn, str(tmp_path / "b"), *more, source, whole)
    assert resumed[0] == resumed[1] == begun[0] == begun[1]
