"""The largest models on thousands of ranks, without the machines: meta tensors and a fake process group."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from tests.training.harness import Degrees
from titanlite.config.sections import ActivationCheckpoint, Compile, Training
from titanlite.models import SHAPES, get_spec
from titanlite.parallel.dist_env import DistEnv
from titanlite.parallel.parallelize import ModelBuilder

#: What tensor parallelism cuts by columns of the weight; all other matrices are cut by rows.
BY_COLUMNS = ("attention.wo.weight", "feed_forward.w2.weight")


@dataclass(frozen=True)
class Layout(Degrees):
    @property
    def ranks(self) -> int:
        return self.dp_replicate * self.dp_shard * self.context * self.tensor * self.pipeline

    def shape_on(self, rank: int, name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of a rank's part of a parameter.

        Tensor parallelism divides first, equally. Then rows are divided in equal parts over the ranks that share
        weights, also those that share a sequence: the last part may be short, ranks after it get none.
        """
        rows, *columns = shape
        if name.endswith(BY_COLUMNS):
            columns = [columns[0] // self.tensor]
        elif columns:
            rows //= self.tensor
        sharing = self.dp_shard * self.context
        part = math.ceil(rows / sharing)
        first = part * (rank // self.tensor % sharing)
        return (max(0, min(part, rows - first)), *columns)

    def stage(self, rank: int) -> int:
        return rank * self.pipeline // self.ranks


@contextmanager
def fake_world(rank: int, size: int) -> Iterator[DistEnv]:
    """Rank `rank` of `size`, with collectives that do nothing."""
    assert not dist.is_initialized()
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    try:
        yield DistEnv(rank, 0, size, torch.device("cpu"))
    finally:
        dist.destroy_process_group()


def build_on(world: DistEnv, layout: Layout, flavor: str, **training: Any) -> nn.Module:
    """What `ModelBuilder.build` does before it needs memory, with recomputed and compiled blocks."""
    return ModelBuilder(
        get_spec("llama3"),
        SHAPES["llama3"][flavor],
        layout.build(world),
        world.device,
        Training(compile=True, **training),
        activation_checkpoint=ActivationCheckpoint(mode="full"),
        compile=Compile(components=["model"]),
    ).build_on_meta()


def whole_shapes(flavor: str) -> dict[str, tuple[int, ...]]:
    plain = get_spec("llama3").build_on_meta(SHAPES["llama3"][flavor])
    return {name: tuple(p.shape) for name, p in plain.named_parameters()}


def assert_shapes(model: nn.Module, layout: Layout, rank: int, whole: dict[str, tuple[int, ...]]) -> None:
    """Every parameter has its whole shape, and what is on this rank is what `Layout.shape_on` says."""
    for name, parameter in model.named_parameters():
        assert isinstance(parameter, DTensor) and tuple(parameter.shape) == whole[name]
        assert tuple(parameter.to_local().shape) == layout.shape_on(rank, name, whole[name]), name
        assert parameter.to_local().device.type == "meta"


# name: layout, flavor, blocks of the first, a middle and the last pipeline rank
ALL_TOGETHER = {
    "70B on 64": (Layout(dp_shard=4, context=2, tensor=4, pipeline=2), "3.1-70B", (41, 39, 39)),
    "405B on 4,096": (Layout(2, 8, 2, 8, 16), "3.1-405B", (7, 8, 7)),
}


@pytest.mark.slow
@pytest.mark.parametrize(("layout", "flavor", "blocks"), ALL_TOGETHER.values(), ids=ALL_TOGETHER)
def test_all_parallelisms_together_divide_the_largest_models(
    layout: Layout, flavor: str, blocks: tuple[int, int, int]
) -> None:
    """Weights over data and context ranks, products over tensor ranks, blocks over pipeline ranks."""
    whole = whole_shapes(flavor)
    assert SHAPES["llama3"][flavor].n_layers == {"3.1-70B": 80, "3.1-405B": 126}[flavor]
    for rank, count in zip((0, layout.ranks // 2 + 5, layout.ranks - 1), blocks, strict=True):
        with fake_world(rank, layout.ranks) as world:
            model = build_on(world, layout, flavor)
            names = [name for name, _ in model.named_parameters()]
            assert len({name.split(".")[1] for name in names if name.startswith("layers.")}) == count
            assert ("tok_embeddings.weight" in names) == (layout.stage(rank) == 0)
            assert ("output.weight" in names) == (layout.stage(rank) == layout.pipeline - 1)
            assert_shapes(model, layout, rank, whole)
            wq = dict(model.named_parameters())[next(name for name in names if "wq" in name)]
            assert wq.device_mesh.size() == layout.ranks // layout.pipeline  # replicas too
