"""Activations that wait in host memory: which ones, in which order they are copied, and what that
frees.
"""

from __future__ import annotations

import gc
from dataclasses import replace
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from tests.support.checkpoints import assert_equal
from tests.support.harness import (
    EVERY_2,
    FULL,
    NONE,
    Run,
    build_tiny,
    full_precision,
    micro_batches,
)
from tests.support.pool import Pools
from tests.support.recompute import FOUR, RUN, TOKENS, build, gradients, traced
from titanlite.config.sections import ActivationCheckpoint
from titanlite.dist.dist_env import DistEnv
from titanlite.parallel.host_memory import HostMemory
from titanlite.parallel.offload_blocks import offload

CPU = torch.device("cpu")


class Shelf:
    """Stands for host memory: keeps the tensors that it is sent."""

    device = CPU

    def __init__(self) -> None:
        self.kept: list[Kept] = []

    def send(self, tensor: Tensor) -> Kept:
        self.kept.append(Kept(tensor.clone()))
        return self.kept[-1]

    @property
    def nbytes(self) -> int:
        return sum(kept.tensor.nbytes for kept in self.kept)


class Kept:
    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor
        self.fetched = 0

    def fetch(self) -> Tensor:
        self.fetched += 1
        return self.tensor


def on_shelf(model: nn.Module, blocks: Any = None, least_bytes: int = 0) -> Shelf:
    """Offload the blocks of a model (or the given modules) to a new shelf."""
    shelf = Shelf()
    for block in model.layers.values() if blocks is None else blocks:  # type: ignore[operator,union-attr]
        offload(block, cast(HostMemory, shelf), model, least_bytes=least_bytes)
    return shelf


@pytest.fixture(scope="module")
def plain_gradients() -> dict[str, Tensor]:
    return gradients(build(NONE))


@pytest.mark.parametrize("settings", [NONE, EVERY_2, FULL], ids=["none", "every", "full"])
def test_tensors_that_blocks_keep_are_sent_and_nothing_else(
    settings: ActivationCheckpoint, plain_gradients: dict[str, Tensor]
) -> None:
    model = build(settings)
    inputs = []
    shelf = on_shelf(model)
    for block in model.layers.values():  # type: ignore[operator,union-attr]
        block.register_forward_pre_hook(
            lambda _, args: inputs.append(StorageWeakRef(args[0].untyped_storage()))
        )
    output = model(TOKENS[0])
    if settings != EVERY_2:
        gc.collect()
        assert [ref.expired() for ref in inputs] == [True] * 4, (
            "the input of a block that is away is free"
        )
    output.logsumexp(-1).sum().backward()
    assert_equal(
        {name: p.grad for name, p in model.named_parameters() if p.grad is not None},
        plain_gradients,
    )
    # 8 sequences, where the trace has 4. A tensor is sent once and fetched by each operator that
    # saved it.
    assert shelf.nbytes == 2 * traced(settings).total_bytes
    assert all(kept.fetched for kept in shelf.kept)
    weights = {p.detach().sum().item() for p in model.parameters()}
    assert not [kept.tensor.shape for kept in shelf.kept if kept.tensor.sum().item() in weights], (
        "a weight was sent"
    )
    assert list(model.state_dict()) == list(build(NONE).state_dict())


def test_small_tensors_and_a_cpus_model_stay() -> None:
    model = build(FULL)
    shelf = on_shelf(model, least_bytes=8 * 32 * FOUR.dim * 4 + 1)
    gradients(model)
    assert shelf.kept == []
    plain = build(NONE)
    offloaded = build(ActivationCheckpoint(mode="none", offload=True))
    assert {type(block) for block in offloaded.modules()} == {
        type(block) for block in plain.modules()
    }


class Views(nn.Module):
    """Saves parts of one memory."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 32)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        a, b = y.chunk(2, -1)
        # As many elements as its memory, but it only repeats one column.
        part = y[:, 1:2].expand(8, 32)
        return (a * b).sum() + (part * part).sum()


def test_views_come_back_as_they_were() -> None:
    found = []
    for away in (False, True):
        torch.manual_seed(0)
        block = Views()
        shelf = on_shelf(block, [block] if away else [])
        x = torch.randn(8, 16, requires_grad=True)
        block(x).sum().backward()
        assert bool(shelf.kept) is away
        found.append({"x": x.grad, **{name: p.grad for name, p in block.named_parameters()}})
    assert_equal(*found)


def _sent(world: DistEnv, run: Run) -> tuple[int, int]:
    model, _, rank = build_tiny(world, run)
    shelf = on_shelf(model)
    for batch in micro_batches(run, 0, rank, world.size):
        model(batch.tokens).sum().backward()
    return shelf.nbytes, [p.grad for p in model.parameters()].count(None)


def test_gathered_weights_of_a_sharded_block_stay(pool: Pools) -> None:
    run = replace(RUN, training=full_precision(reshard_after_forward="always"))
    assert pool(2).run(_sent, run) == [(traced(NONE).total_bytes, 0)] * 2
