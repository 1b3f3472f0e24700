"""Training in float8: as good as bf16, the same in every division of the work, and
resumable.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.support.checkpoints import RUN as SAVED
from tests.support.checkpoints import assert_equal, two_and_two
from tests.support.compare import distance, spread
from tests.support.float8_runs import (
    EMULATED,
    MX,
    PRECOMPUTED,
    RATES,
    RUN,
    WIDE,
    recipe,
)
from tests.support.harness import FULL, OP, TINY, changed, train
from tests.support.pool import Pools
from titanlite.config.sections import Compile, Float8
from titanlite.models.deepseek_v3 import DeepSeekV3Args

pytestmark = pytest.mark.slow
PP: dict[str, Any] = {"pipeline": 2, "args": replace(TINY, n_layers=4)}
#: Latents are made of each rank's part of the sequence.
LATENT: dict[str, Any] = {
    "tensor": 2,
    "family": "deepseek_v3",
    "args": DeepSeekV3Args(
        dim=64,
        n_layers=2,
        n_heads=4,
        ffn_dim=96,
        vocab_size=192,
        max_seq_len=64,
        q_lora_rank=48,
        kv_lora_rank=32,
        qk_nope_head_dim=16,
        qk_rope_head_dim=16,
        v_head_dim=16,
        expert_width=32,
        n_experts=4,
    ),
}


@pytest.fixture(scope="module")
def seeds(pool: Pools) -> list[list[float]]:
    """Losses of 40 steps in bf16 from three seeds."""
    long = replace(RUN, rates=RATES)
    return [pool(1).run(train, replace(long, seed=seed))[0].losses for seed in (7, 8, 9)]


@pytest.mark.parametrize(
    ("float8", "most"), [(EMULATED, 2), (recipe("rowwise_with_gw_hp"), 2), (MX, 0.5)]
)
def test_losses_stay_within_the_spread_of_seeds(pool, seeds, float8, most):
    """Mean distance from bf16, as a share of that of another seed; and the model learns."""
    ours = pool(1).run(train, replace(RUN, rates=RATES, float8=float8))[0].losses
    assert 0 < distance(ours, seeds[0]) < most * spread(seeds[0], seeds[1:])
    assert ours[-1] < ours[0] - 1.0


@pytest.mark.parametrize(
    ("float8", "changes", "ranks"),
    [
        pytest.param(
            changed(EMULATED, filter_fqns=["wk", "w2"]), {"tensor": 2}, 2, id="tp 2, some kept"
        ),
        pytest.param(PRECOMPUTED, {"tensor": 2}, 4, id="tp 2, fsdp 2, gathered"),
        pytest.param(EMULATED, {**LATENT, "expert": 2}, 2, id="tp 2, latent attention, ep 2"),
        pytest.param(PRECOMPUTED, PP, 2, id="pp 2"),
        # Rows of activations are scaled one by one, so nothing depends on how they are divided.
        pytest.param(recipe("rowwise"), {}, 2, id="rowwise"),
        pytest.param(MX, {"context": 2}, 2, id="mx, cp 2"),
        pytest.param(MX, {"tensor": 2, "args": WIDE}, 4, id="mx, tp 2, fsdp 2"),
    ],
)
def test_the_losses_are_those_of_one_rank(pool, float8, changes, ranks):
    """Ten steps, but for rounding; three seeds differ by more."""
    run = replace(RUN, float8=float8, **changes)
    alone = pool(1).run(train, run.alone())[0].losses
    ours = pool(ranks).run(train, run)[0].losses
    assert distance(ours, alone) < (0.005 if float8.is_mx else 0.02), (ours, alone)
    if float8.is_mx:
        assert ours != pool(ranks).run(train, replace(run, float8=Float8()))[0].losses


#: Groups of float8 weights alone: gloo knows no float8, so they travel as bytes.
GROUPS = changed(RUN.training, fsdp_units=["Attention", "FeedForward"])


@pytest.mark.parametrize(
    ("float8", "ways"),
    [
        (PRECOMPUTED, [{"activations": FULL}, {"activations": OP}, {"training": GROUPS}]),
        (MX, [{"activations": OP}]),
    ],
    ids=["all-gather", "mx"],
)
def test_recomputation_and_groups_within_blocks_give_the_same_numbers(pool, float8, ways):
    """Bit for bit."""
    run = replace(RUN, rates=RATES[:4], float8=float8)
    plain = pool(2).run(train, run)[0]
    for changes in ways:
        ours = pool(2).run(train, replace(run, **changes))[0]
        assert (ours.losses, ours.norms) == (plain.losses, plain.norms), changes
        assert_equal(ours.weights, plain.weights)


@pytest.mark.parametrize("float8", [PRECOMPUTED, MX], ids=["all-gather", "mx"])
def test_resumed_steps_are_those_without_a_break_bit_for_bit(pool, tmp_path, float8):
    """The scales of gathered weights are not in the checkpoint: the first step finds them again."""
    run = replace(SAVED, training=RUN.training, float8=float8)
    assert len(set(two_and_two(pool, run, tmp_path)["losses"])) == 4


def test_compiled_blocks_give_the_numbers_of_eager_ones(pool):
    run = replace(RUN, rates=RATES[:2], float8=MX, activations=OP)
    eager = pool(1).run(train, run)[0]
    ours = pool(1).run(train, replace(run, compile=Compile(backend="aot_eager")))[0]
    assert (ours.losses, ours.norms) == (eager.losses, eager.norms)
