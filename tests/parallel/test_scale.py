"""The largest models on thousands of ranks, without the machines: tensors on the meta device, a fake process group."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from titanlite.config.plans import MeshPlan, ShardPlan
from titanlite.models import SHAPES, get_spec
from titanlite.parallel.fsdp import shard
from titanlite.parallel.units import choose_units
from titanlite.parallel.world import World


@dataclass(frozen=True)
class Layout:
    """Degrees of parallelism; their product is the number of ranks."""

    dp_replicate: int = 1
    dp_shard: int = 1

    @property
    def ranks(self) -> int:
        return self.dp_replicate * self.dp_shard

    def shape_on(self, rank: int, shape: tuple[int, ...]) -> tuple[int, ...]:
        """What a rank holds of a parameter: rows dealt out in equal parts, the last part short, ranks after it none."""
        rows = math.ceil(shape[0] / self.dp_shard)
        first = rows * (rank % self.dp_shard)
        return (max(0, min(rows, shape[0] - first)), *shape[1:])


@contextmanager
def fake_world(rank: int, size: int) -> Iterator[World]:
    """Rank `rank` of `size`, whose collectives do nothing."""
    assert not dist.is_initialized()
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    try:
        yield World(rank, 0, size, torch.device("cpu"))
    finally:
        dist.destroy_process_group()


def build_on(world: World, layout: Layout, flavor: str, plan: ShardPlan) -> nn.Module:
    """The steps of `build_model` up to where memory is needed."""
    spec, args = get_spec("llama3"), SHAPES["llama3"][flavor]
    with torch.device("meta"):
        model = spec.build(args)
    mesh = world.build_mesh(MeshPlan(layout.ranks, layout.dp_replicate, layout.dp_shard))
    shard(model, choose_units(model, plan, spec.fsdp_units(args)), mesh, plan)
    return model


LAYOUTS = {
    "fsdp 64": Layout(dp_shard=64),
    "fsdp 512": Layout(dp_shard=512),
    "fsdp 4096": Layout(dp_shard=4096),  # 15 s: torch cuts each parameter into 4,096 tensors
    "hsdp 8x8": Layout(8, 8),
    "hsdp 8x64": Layout(8, 64),
    "hsdp 8x512": Layout(8, 512),
    "hsdp 64x64": Layout(64, 64),
}
QUICK = [("fsdp 512", "3.1-70B"), ("hsdp 8x512", "3.1-405B")]
CELLS = [
    pytest.param(layout, flavor, id=f"{name}, {flavor}", marks=[] if (name, flavor) in QUICK else pytest.mark.slow)
    for name, layout in LAYOUTS.items()
    for flavor in ("3.1-70B", "3.1-405B")
]


@pytest.mark.parametrize(("layout", "flavor"), CELLS)
def test_the_largest_models_are_sharded_over_thousands_of_ranks(layout: Layout, flavor: str) -> None:
    with torch.device("meta"):
        plain = get_spec("llama3").build(SHAPES["llama3"][flavor])
    whole = {name: tuple(p.shape) for name, p in plain.named_parameters()}
    rank = layout.ranks - 1  # where parts are short or missing
    with fake_world(rank, layout.ranks) as world:
        model = build_on(world, layout, flavor, ShardPlan())
        found = dict(model.named_parameters())
        assert found.keys() == whole.keys()
        for name, parameter in found.items():
            assert isinstance(parameter, DTensor) and tuple(parameter.shape) == whole[name]
            assert tuple(parameter.to_local().shape) == layout.shape_on(rank, whole[name]), name
        assert {p.to_local().device.type for p in found.values()} == {"meta"}


@pytest.mark.parametrize(
    ("rank", "rows", "weights"),
    [
        (0, 251, 137_808_400),  # ceil(128,256 / 512) rows of the embedding
        (510, 246, 137_726_480),
        (511, 0, 133_696_016),
    ],
)
def test_an_uneven_embedding_leaves_the_last_ranks_short(rank: int, rows: int, weights: int) -> None:
    layout = Layout(dp_shard=512)
    with fake_world(rank, 512) as world:
        model = build_on(world, layout, "3.1-70B", ShardPlan())
        parts = {name: p.to_local() for name, p in model.named_parameters() if isinstance(p, DTensor)}
        assert parts["tok_embeddings.weight"].shape == parts["output.weight"].shape == (rows, 8192)
        assert parts["layers.79.attention.wk.weight"].shape == (2, 8192)
        assert sum(part.numel() for part in parts.values()) == weights


@pytest.mark.parametrize("units", ["size", ("Attention", "FeedForward")], ids=str)
def test_other_units_shard_the_same_rows(units: str) -> None:
    layout = Layout(2, 32)
    with fake_world(63, 64) as world:
        plan = ShardPlan(units=units, min_params=2_000_000_000, prefetch=1)  # type: ignore[arg-type]
        model = build_on(world, layout, "3.1-70B", plan)
        for parameter in model.parameters():
            assert isinstance(parameter, DTensor)
            assert tuple(parameter.to_local().shape) == layout.shape_on(63, tuple(parameter.shape))
