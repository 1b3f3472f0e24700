"""Float8 products: their types, gathered bytes, reductions, scales; weights and names stay as they
are.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import product

import pytest
import torch
from torch import Tensor, nn
from torch.profiler import profile

from tests.support.checkpoints import assert_equal
from tests.support.float8_runs import (
    CONVERTED,
    EMULATED,
    GATHERED,
    LINEARS,
    MX,
    PRECOMPUTED,
    REAL,
    RECIPES,
    RUN,
    TOTAL,
    recipe,
    watch_step,
)
from tests.support.harness import (
    Run,
    build_tiny,
    micro_batches,
    stepper,
    train,
    weights_of,
)
from titanlite.checkpoint.state_dict import gather
from titanlite.config.sections import Float8, Training
from titanlite.dist.dist_env import DistEnv
from titanlite.features.float8.choice import too_small
from titanlite.features.float8.gathered import ScalePrecompute
from titanlite.features.float8.package import float8_linears
from titanlite.models import get_spec
from titanlite.models.spec import Size
from titanlite.parallel.feature_linear import weights_replaced

SPEC = get_spec("llama3")
NEVER = Training(reshard_after_forward="never")


FORWARD = ("input e4m3fn", "weight e4m3fn")
BF16 = ("bfloat16", "bfloat16")


@pytest.mark.parametrize(
    ("float8", "products"),
    [  # three products of the head are never converted
        (Float8(), {BF16: 3 * LINEARS + 3}),
        (
            EMULATED,
            {
                FORWARD: LINEARS,
                ("grad_output e5m2", FORWARD[1]): LINEARS,
                ("grad_output e5m2", FORWARD[0]): LINEARS,
            },
        ),
        (
            recipe("rowwise"),
            {
                FORWARD: LINEARS,
                ("grad_output e4m3fn", FORWARD[1]): LINEARS,
                ("grad_output e4m3fn", FORWARD[0]): LINEARS,
            },
        ),
        (
            recipe("rowwise_with_gw_hp"),
            {FORWARD: LINEARS, ("grad_output e4m3fn", FORWARD[1]): LINEARS, BF16: LINEARS + 3},
        ),
        (MX, {("MXTensor", "MXTensor"): 3 * LINEARS}),
    ],
    ids=["off", *RECIPES, "mxfp8"],
)
def test_products_have_the_types_of_their_recipe(pool, float8, products):
    assert pool(1).run(watch_step, replace(RUN, float8=float8))[0].products == {BF16: 3, **products}


@pytest.mark.slow
def test_initial_weights_and_those_of_a_checkpoint_are_those_without_float8(pool):
    weights, plain = pool(2).run(_weights, RUN)[0]
    for float8 in (GATHERED, MX):
        found, saved = pool(2).run(_weights, replace(RUN, float8=float8))[0]
        assert_equal(found, weights)
        assert saved == plain


def _weights(world: DistEnv, run: Run) -> tuple[dict[str, Tensor], dict[str, tuple[str, ...]]]:
    """Initial weights, and the types, inside and out, and dtypes that a checkpoint gets."""
    model, optimizer, _ = build_tiny(world, run)
    types = {}
    for name, tensor in gather(model, optimizer).items():
        inside = type(getattr(tensor, "_local_tensor", tensor)).__name__
        types[name] = type(tensor).__name__, inside, str(tensor.dtype)
    return weights_of(model), types


def _kernels(world: DistEnv, run: Run) -> tuple[int, list[float]]:
    """Float8 operators below the products of one forward and backward, and losses of three
    steps.
    """
    model, _, rank = build_tiny(world, run)
    batch = micro_batches(run, 0, rank, world.size)[0]
    with profile() as prof:
        model(batch.tokens).sum().backward()
    return Counter(event.name for event in prof.events())["aten::_scaled_mm"], train(
        world, run
    ).losses


@pytest.mark.slow
@pytest.mark.parametrize("name", RECIPES)
def test_emulation_computes_the_numbers_of_scaled_mm(pool, name):
    """torch has that operator for CPUs too: the kernels of a GPU run here, if slowly."""
    run = replace(RUN, rates=RUN.rates[:3])
    (real, losses), (emulated, others), (none, bf16) = (
        pool(1).run(_kernels, replace(run, float8=float8))[0]
        for float8 in (recipe(name, REAL), recipe(name), Float8())
    )
    assert (real, emulated, none) == (LINEARS * (2 if name == "rowwise_with_gw_hp" else 3), 0, 0)
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(others), rtol=0, atol=2e-3)
    assert losses != bf16


@pytest.mark.parametrize("name", ["tensorwise", "rowwise"])
def test_sizes_too_small_to_gain_are_torchaos(name):
    from torchao.float8 import _auto_filter_for_recipe

    wanted = _auto_filter_for_recipe(name, [])
    sides = [16, 1008, 1024, 1040, 2032, 2048, 2064, 4080, 4096, 4112, 16384]
    with torch.device("meta"):
        for k, n in product(sides, repeat=2):
            assert too_small(Size(k, n), name) is not wanted(nn.Linear(k, n), "w"), (k, n)


def test_converted_weights_are_gathered_as_half_the_bytes_of_bf16_with_one_reduction_of_scales(
    pool,
):
    """Besides the step's own two all-reduces.

    Without precompute, one for each weight and time it is gathered.
    """
    plain_seen, emulated, gathered, precomputed = (
        pool(2).run(watch_step, replace(RUN, training=NEVER, float8=float8))
        for float8 in (Float8(), EMULATED, GATHERED, PRECOMPUTED)
    )
    assert plain_seen[0].gathered == emulated[0].gathered == 2 * TOTAL
    for seen in (*gathered, *precomputed):
        assert seen.gathered == 2 * TOTAL - CONVERTED, "half of theirs is one byte each"
        assert seen.products[FORWARD] == LINEARS
    for seen, scales, reductions in ((gathered[0], LINEARS, 2), (precomputed[0], 0, 3)):
        assert (seen.sent["all_reduce"], seen.sent["allreduce"]) == (scales, reductions)


def _scales(world: DistEnv, run: Run) -> tuple[list[float], list[float]]:
    """Scales after a step: precomputed, and those that the next all-gather finds by itself."""
    model, _, take = stepper(world, run)
    mesh = run.builder(world).mesh
    precompute = ScalePrecompute(model, mesh)
    precompute()
    take(1, lr=1e-2)
    precompute()
    wrappers = [linear.weight._local_tensor for linear in float8_linears(model)]
    ours = [w._precomputed_scale.item() for w in wrappers]
    weights_replaced(model)
    shards = mesh["dp_shard"]
    return ours, [w.fsdp_pre_all_gather(shards)[1][0].item() for w in wrappers]


def test_precomputed_scales_are_those_found_weight_by_weight(pool):
    ranks = pool(2).run(_scales, replace(RUN, float8=GATHERED))
    assert all(ours == single and len(ours) == LINEARS for ours, single in ranks)
    assert ranks[0] == ranks[1]
    assert len(set(ranks[0][0])) == LINEARS
