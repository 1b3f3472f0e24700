"""Initial weights: the same on any mesh, nothing left unset, the right distributions."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from tests.support.checkpoints import assert_equal
from tests.support.harness import TINY, Run, initial_weights
from titanlite.dist.dist_env import DistEnv
from titanlite.models.spec import Init
from titanlite.parallel.init import ROWS, _draw, fill, materialize, seed_generators
from titanlite.run.config import MeshSizes

RUN = Run(torch.zeros(0), torch.zeros(0), [], args=replace(TINY, vocab_size=3 * ROWS + 1))


@pytest.mark.parametrize(
    ("ranks", "changes"),
    [
        (4, {}),
        # 386 rows over two ranks and then over two more leave shards of 97 and 96.
        (2, {"tensor": 2, "args": replace(TINY, vocab_size=386, tied=True)}),
        (4, {"tensor": 2, "replicas": 2, "args": replace(TINY, vocab_size=386, tied=True)}),
    ],
    ids=["fsdp 4", "tp 2, tied", "tp 2, ddp 2, tied"],
)
def test_weights_are_those_of_one_rank_bit_for_bit(pool, ranks, changes):
    run = replace(RUN, **changes)
    alone = pool(1).run(initial_weights, run.alone())[0]
    for weights in pool(ranks).run(initial_weights, run):
        assert_equal(weights, alone)


def test_weights_depend_on_name_row_and_seed(pool):
    alone = pool(1).run(initial_weights, RUN)[0]
    wq = alone["layers.0.attention.wq.weight"]
    others = pool(1).run(initial_weights, replace(RUN, seed=2))[0]
    assert not torch.equal(wq, others["layers.0.attention.wq.weight"])
    assert not torch.equal(wq, alone["layers.1.attention.wq.weight"])
    assert not torch.equal(*wq.chunk(2))


def test_any_row_and_column_range_is_a_cut_of_the_whole():
    shape = (2 * ROWS + 5, 6)
    init = Init("trunc_normal", std=0.02, bound=0.06)
    whole = torch.empty(shape)
    fill(whole, (0, 0), shape, "w", init, seed=3)
    assert whole.abs().max() <= 0.06
    assert abs(whole.std().item() - 0.0197) < 1e-3
    # A block of rows draws as torch does.
    ours, theirs = (torch.Generator().manual_seed(7) for _ in range(2))
    drawn = _draw((ROWS, 300), init, ours)
    assert drawn.equal(nn.init.trunc_normal_(torch.empty(ROWS, 300), 0, 0.02, -0.06, 0.06, theirs))
    assert ours.get_state().equal(theirs.get_state())
    for rows, columns in [
        (slice(0, 1), slice(0, 6)),
        (slice(ROWS - 1, ROWS + 2), slice(2, 5)),
        (slice(200, 261), slice(0, 6)),
    ]:
        part = torch.empty_like(whole[rows, columns])
        fill(part, (rows.start, columns.start), shape, "w", init, seed=3)
        assert torch.equal(part, whole[rows, columns])


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.float32], ids=str)
def test_a_forgotten_parameter_or_buffer_is_named(dtype):
    """Memory of before would be weights, positions or masks."""

    def fill(module):
        nn.init.ones_(module.weight)

    with torch.device("meta"):
        model = nn.Linear(4, 4)
        model.register_buffer("table", torch.empty(3, dtype=dtype), persistent=False)
        model.register_buffer("empty", torch.empty(0, dtype=dtype))
    with pytest.raises(RuntimeError, match="no initial value for: bias, table"):
        materialize(model, torch.device("cpu"), fill)


def _drawn(world: DistEnv, degrees: MeshSizes) -> int:
    seed_generators(5, world.build_mesh(**degrees.dimensions))
    return int(torch.randint(2**40, ()))


@pytest.mark.parametrize(
    ("degrees", "alike"),
    [
        (MeshSizes(dp_shard=2, tensor=2), [(0, 1), (2, 3)]),
        (MeshSizes(dp_replicate=2, context=2), [(0,), (1,), (2,), (3,)]),
    ],
    ids=["fsdp x tp", "ddp x cp"],
)
def test_generators_differ_except_among_ranks_that_share_products(pool, degrees, alike):
    drawn = pool(4).run(_drawn, degrees)
    assert len(set(drawn)) == len(alike)
    assert all(len({drawn[rank] for rank in ranks}) == 1 for ranks in alike)
