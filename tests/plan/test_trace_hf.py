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
from titanlite.cli.plan.memory_trace import trace
from titanlite.config.errors import ConfigError
from titanlite.data.loader import to_device
from titanlite.dist.dist_env import DistEnv
from titanlite.plan.parts import RankMemory
from titanlite.resolve.load import check_config

SIZES = {"model__vocab_size": 2304, "training__seq_len": 128, "training__batch_size": 2}
MASKS = {"data__mask_documents": "true"}
CHUNKS = {"training__loss_chunks": 4}
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
        ("qwen3", MASKS),
        ("deepseek_v3", {**MASKS, "training__mixed_precision_param": "bfloat16"}),
        ("llama", {**CHUNKS, **MASKS}),
        ("gpt_neox", {**BY_OP, **MASKS}),
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


@pytest.mark.slow
def test_experts_that_torch_runs_in_bfloat16_alone_are_refused(tmp_path: Path) -> None:
    flags = [f"--job.config_file={TOML}", *flags_of(tmp_path, "qwen3_moe", **SIZES)]
    in_bf16 = [*flags, "--training.mixed_precision_param=bfloat16"]
    assert trace(check_config(in_bf16, 2, training=False)[1]).peak.total > 0
    with pytest.raises(ConfigError, match='try training.mixed_precision_param = "bfloat16"'):
        trace(check_config(flags, 2, training=False)[1])
