"""`titanlite plan --exact` of models of transformers against their real steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.plan.measured import measure_step
from tests.support.hf import TOML
from tests.support.hf_compare import flags_of
from tests.support.pool import Pools
from tests.support.tiny import KEPT_TOKENS
from titanlite import build, load_config
from titanlite.cli.plan.trace import trace
from titanlite.data.loader import to_device
from titanlite.dist.dist_env import DistEnv
from titanlite.plan.hardware import cluster_of
from titanlite.plan.parts import RankMemory
from titanlite.plan.plan import make_plan
from titanlite.resolve.load import check_config

SIZES = {"model__vocab_size": 2304, "training__seq_len": 128, "training__batch_size": 2}
TP = {"training__tensor_parallel_degree": 2}
MASKS = {"data__mask_documents": "true"}
CHUNKS = {"training__loss_chunks": 4}
EP = {"parallelism__expert_parallel_degree": 2}
BY_OP = {
    "activation_checkpoint__mode": "selective",
    "activation_checkpoint__selective_ac_option": "op",
}


def measure(world: DistEnv, flags: list[str]) -> RankMemory:
    """Measure a real step after the first.

    The least of three: a thread of gloo may hold a buffer for a moment longer.
    """
    run = load_config(TOML, world.size, flags)
    parts = build(run, world)
    try:
        parts.train_step(to_device(parts.loader.next_step(), world.device), 1, 1e-3)
        batches = to_device(parts.loader.next_step(), world.device)
        steps = [measure_step(world, run, parts, batches) for _ in range(3)]
        return min(steps, key=lambda step: step.peak.total)
    finally:
        parts.close()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "keys"),
    [
        ("qwen3", {**TP, **MASKS}),
        ("qwen3_moe", EP),
        pytest.param("llama", TP, marks=pytest.mark.slow),
        pytest.param("gpt_oss", {**EP, **BY_OP}, marks=pytest.mark.slow),
        pytest.param("deepseek_v3", MASKS, marks=pytest.mark.slow),
        pytest.param("llama", {**CHUNKS, **MASKS}, marks=pytest.mark.slow),
        pytest.param("gemma2", {**TP, **MASKS}, marks=pytest.mark.slow),
        pytest.param("gpt_neox", {**TP, **BY_OP, **MASKS}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_the_peak_is_that_of_the_real_run(
    pool: Pools, tmp_path: Path, kind: str, keys: dict[str, Any]
) -> None:
    flags = [*flags_of(tmp_path, kind, **SIZES, **keys), KEPT_TOKENS]
    real = pool(2).run(measure, flags)[1].peak
    run = check_config([f"--job.config_file={TOML}", *flags], 2, training=False)[1]
    traced = trace(run, 1, "cpu").peak
    assert traced.total == pytest.approx(real.total, rel=0.05)
    assert traced.phase == real.phase
    for part, size in real.parts.items():
        assert traced.parts[part] == pytest.approx(size, rel=0.05, abs=0.02 * real.total), part


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("kind", ["mixtral", "gpt_oss"])
def test_a_model_that_tensor_parallelism_cannot_divide_is_planned(
    tmp_path: Path, kind: str
) -> None:
    """Experts of transformers have no plan of tensor parallelism."""
    flags = flags_of(tmp_path, kind, **SIZES, **EP)
    run = check_config([f"--job.config_file={TOML}", *flags], 2, training=False)[1]
    plan = make_plan(run, cluster_of(run, gpu="h100-80g"), 0, trace)
    assert plan.exact
    assert plan.speed.parts["expert traffic"] > 0
