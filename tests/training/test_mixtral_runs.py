"""Training runs of a small Mixtral: equal however the work is divided."""

from __future__ import annotations

import re
from typing import Any

import pytest

from tests.support.pool import Pools
from tests.support.steps import train_rows
from tests.support.tiny import TWO_LAYERS
from titanlite.dist.dist_env import DistEnv

FLAGS = [
    *TWO_LAYERS,
    "--model.name=mixtral",
    "--model.overrides.n_kv_heads=2",
    "--model.overrides.ffn_dim=64",
    "--model.overrides.aux_loss=0.1",
    "--model.overrides.z_loss=0.01",
    "--training.batch_size=1",
    "--training.global_batch_size=4",
    "--training.steps=4",
    "--metrics.log_freq=1",
    "--training.mixed_precision_param=float32",
    "--no-validation.enable",
]


def _run(world: DistEnv, folder: str, *flags: str) -> list[dict[str, Any]]:
    return [row for row in train_rows(world, folder, *FLAGS, *flags) if "loss" in row]


@pytest.fixture(scope="module")
def alone(pool: Pools, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return pool(1).run(_run, str(tmp_path_factory.mktemp("alone")))[0]


PP = "experimental.pipeline_parallel_"
AC = "--activation_checkpoint.mode="
STAGES = [f"--{PP}degree=2", "--training.batch_size=2"]


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(
    ("ranks", "flags"),
    [
        (2, ["--parallelism.expert_parallel_degree=2"]),
        (2, [*STAGES, "--training.loss_chunks=2"]),
        (
            2,
            [
                *STAGES,
                f"--{PP}schedule=ZBVZeroBubble",
                f"--{PP}split_points=['layers.0','layers.1','norm']",
            ],
        ),
        (1, [f"{AC}full", "--training.loss_chunks=3"]),
    ],
)
def test_equal_however_the_work_is_divided(pool, alone, tmp_path, ranks, flags):
    rows = pool(ranks).run(_run, str(tmp_path), *flags)[0]
    assert len(rows) == 4
    for row, expected in zip(rows, alone, strict=True):
        names = [name for name in expected if re.match("loss|grad_norm|experts/", name)]
        assert len(names) == 8
        assert {n: row[n] for n in names} == pytest.approx(
            {n: expected[n] for n in names}, rel=1e-4
        )
