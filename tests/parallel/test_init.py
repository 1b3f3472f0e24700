"""Initial weights: the same on any mesh, nothing left unset, the distributions asked for."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from tests.pool import Pools
from tests.training.harness import TINY, Run, initial_weights
from titanlite.config.plans import MeshPlan
from titanlite.models.spec import Init
from titanlite.parallel.init import ROWS, InitError, fill, init_weights, materialize, seed_generators
from titanlite.parallel.world import World

ARGS = replace(TINY, vocab_size=3 * ROWS + 1)
NOTHING = torch.zeros(0)


def test_weights_do_not_depend_on_the_number_of_ranks(pool: Pools) -> None:
    run = Run(NOTHING, NOTHING, [], args=ARGS)
    alone = pool(1).run(initial_weights, run)[0]
    for ranks in (2, 4):
        for weights in pool(ranks).run(initial_weights, run):
            assert weights.keys() == alone.keys()
            for name, weight in weights.items():
                assert torch.equal(weight, alone[name]), f"{name} on {ranks} ranks"


def test_shards_differ_and_seeds_differ(pool: Pools) -> None:
    run = Run(NOTHING, NOTHING, [], args=ARGS)
    first, second = (pool(1).run(initial_weights, replace(run, seed=seed))[0] for seed in (1, 2))
    name = "layers.0.attention.wq.weight"
    assert not torch.equal(first[name], second[name])
    assert not torch.equal(first[name], first["layers.1.attention.wq.weight"])
    top, bottom = first[name].chunk(2)
    assert not torch.equal(top, bottom)


def test_any_row_and_column_range_is_a_cut_of_the_whole() -> None:
    shape, init = (2 * ROWS + 5, 6), Init("trunc_normal", std=0.02, bound=0.06)
    whole = torch.empty(shape)
    fill(whole, (0, 0), shape, "w", init, seed=3)
    assert whole.abs().max() <= 0.06 and abs(whole.std().item() - 0.0197) < 1e-3
    for rows, columns in [
        (slice(0, 1), slice(0, 6)),
        (slice(ROWS - 1, ROWS + 2), slice(2, 5)),
        (slice(200, 261), slice(0, 6)),
    ]:
        part = torch.empty_like(whole[rows, columns])
        fill(part, (rows.start, columns.start), shape, "w", init, seed=3)
        assert torch.equal(part, whole[rows, columns])


def test_a_forgotten_parameter_or_buffer_is_named() -> None:
    with torch.device("meta"):
        model = nn.Linear(4, 4)
        model.register_buffer("table", torch.empty(3), persistent=False)

    def only_the_weight(module: nn.Module) -> None:
        nn.init.ones_(module.weight)  # type: ignore[arg-type]

    with pytest.raises(InitError, match="bias, table"):
        materialize(model, torch.device("cpu"), only_the_weight)


def _plain(world: World) -> dict[str, torch.Tensor]:
    model = nn.Linear(ROWS, ROWS + 3, bias=False)
    init_weights(model, lambda name: Init("normal", std=1.0), seed=0)
    return {name: p.detach() for name, p in model.named_parameters()}


def test_plain_parameters_are_drawn_like_sharded_ones(pool: Pools) -> None:
    (weights,) = pool(1).run(_plain)
    whole = torch.empty(ROWS + 3, ROWS)
    fill(whole, (0, 0), (ROWS + 3, ROWS), "weight", Init("normal", std=1.0), seed=0)
    assert torch.equal(weights["weight"], whole)
    assert abs(whole.std().item() - 1.0) < 0.02


def _drawn(world: World, plan: MeshPlan) -> int:
    seed_generators(5, world.build_mesh(plan))
    return int(torch.randint(2**40, ()))


@pytest.mark.parametrize(
    ("plan", "alike"),
    [
        (MeshPlan(4, dp_shard=2, tensor=2), [(0, 1), (2, 3)]),
        (MeshPlan(4, pipeline=2, tensor=2), [(0, 1), (2, 3)]),
        (MeshPlan(4, dp_replicate=2, context=2), [(0,), (1,), (2,), (3,)]),
        (MeshPlan(4, pipeline=2, dp_shard=2), [(0,), (1,), (2,), (3,)]),
    ],
    ids=["fsdp x tp", "pp x tp", "ddp x cp", "pp x fsdp"],
)
def test_generators_differ_but_among_those_who_share_products(
    pool: Pools, plan: MeshPlan, alike: list[tuple[int, ...]]
) -> None:
    drawn = pool(4).run(_drawn, plan)
    assert len(set(drawn)) == len(alike)
    assert all(len({drawn[rank] for rank in ranks}) == 1 for ranks in alike)
