"""Training in MXFP8 beside what `test_float8_training` has of it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.support.float8_runs import MX, RATES, RUN, distance
from tests.support.harness import OP, train
from tests.support.pool import Pools
from titanlite.config.sections import Compile, Float8
from titanlite.models import resolve_args

pytestmark = pytest.mark.slow
BF16 = Float8()


def test_latent_attention_and_experts_train_as_in_bf16(pool: Pools) -> None:
    """Weights that tensor parallelism leaves whole, as of shared experts, stay in bf16 there."""
    shape = resolve_args("deepseek_v3", "debugmodel", {"n_layers": 2}, tokenizer_size=192)
    args = replace(shape, vocab_size=192, max_seq_len=64)
    run = replace(RUN, family="deepseek_v3", args=args, rates=RATES[:5], tensor=2)
    plain, ours = (pool(2).run(train, replace(run, float8=f))[0].losses for f in (BF16, MX))
    assert 0 < distance(ours, plain) < 0.03
    assert ours[-1] < ours[0] - 0.5


def test_compiled_blocks_give_the_numbers_of_eager_ones(pool: Pools) -> None:
    run = replace(RUN, rates=RATES[:2], float8=MX, activations=OP)
    eager = pool(1).run(train, run)[0]
    ours = pool(1).run(train, replace(run, compile=Compile(backend="aot_eager")))[0]
    assert (ours.losses, ours.norms) == (eager.losses, eager.norms)
