"""Training in MXFP8 beside what `test_float8_training` has of it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.support.float8_runs import RATES, RUN, WIDE, distance
from tests.support.harness import OP, changed, train
from tests.support.mx_runs import MX
from tests.support.pool import Pools
from titanlite.config.sections import Compile, Float8
from titanlite.models import resolve_args

pytestmark = pytest.mark.slow
BF16 = Float8()


@pytest.mark.parametrize("changes", [{}, {"tensor": 2}], ids=["fsdp 2", "tp 2"])
def test_latent_attention_and_experts_train_as_in_bf16(
    pool: Pools, changes: dict[str, Any]
) -> None:
    """Weights that tensor parallelism leaves whole, as of shared experts, stay in bf16 there."""
    shape = resolve_args("deepseek_v3", "debugmodel", {"n_layers": 2}, tokenizer_size=192)
    args = replace(shape, vocab_size=192, max_seq_len=64)
    run = replace(RUN, family="deepseek_v3", args=args, rates=RATES[:5], **changes)
    plain, ours = (pool(2).run(train, replace(run, float8=f))[0].losses for f in (BF16, MX))
    assert 0 < distance(ours, plain) < 0.03
    assert ours[-1] < ours[0] - 0.5


@pytest.mark.parametrize(
    ("changes", "ranks", "backend", "limit"),
    [
        pytest.param({}, 2, "aot_eager", 0.0, id="fsdp 2"),
        pytest.param({"activations": OP}, 1, "aot_eager", 0.0, id="ac op"),
        pytest.param({"tensor": 2, "args": WIDE}, 2, "aot_eager", 1e-4, id="tp 2"),
        pytest.param({}, 1, "inductor", 2e-3, id="inductor", marks=pytest.mark.soak),
    ],
)
def test_compiled_blocks_give_the_numbers_of_eager_ones(
    pool: Pools, changes: dict[str, Any], ranks: int, backend: str, limit: float
) -> None:
    run = replace(RUN, rates=RATES[:4], float8=MX, **changes)
    eager = pool(ranks).run(train, run)[0]
    ours = pool(ranks).run(train, replace(run, compile=Compile(backend=backend)))[0]
    assert distance(ours.losses, eager.losses) <= limit
    assert distance(ours.norms, eager.norms) <= 20 * limit


def test_weights_may_be_stored_in_bf16(pool: Pools) -> None:
    training = changed(RUN.training, dtype="bfloat16")
    run = replace(RUN, training=training)
    plain = pool(2).run(train, run)[0].losses
    ours = pool(2).run(train, replace(run, float8=MX))[0].losses
    assert 0 < distance(ours, plain) < 0.05
