"""The loss of each source of a mixture is the mean over its own targets, however the work is
divided.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.pool import Pools
from tests.support.steps import train_rows
from tests.support.tiny import TWO_LAYERS
from titanlite.assembly.build import build
from titanlite.data.loader import Batch
from titanlite.data.mixtures.figures import RowLosses
from titanlite.data.mixtures.mixed_rows import MixedRows
from titanlite.dist.dist_env import DistEnv
from titanlite.resolve.load import load_config

BATCH = 12
STEPS = 4
FLAGS = [
    *TWO_LAYERS,
    # prompts: rows differ in their targets
    "--data.source=[{name='sft_test', weight=2}, {name='c4_test'}]",
    "--training.seq_len=32",
    "--training.batch_size=3",
    f"--training.global_batch_size={BATCH}",
    f"--training.steps={STEPS}",
    f"--metrics.log_freq={STEPS}",
    "--optimizer.lr=1e-12",
    "--no-validation.enable",
]


def _run(world: DistEnv, folder: str, *flags: str) -> list[dict[str, Any]]:
    return [row for row in train_rows(world, folder, *FLAGS, *flags) if "loss" in row]


def _by_hand(world: DistEnv) -> dict[str, float]:
    """The losses of the rows of steps 2 … STEPS, each row by itself."""
    parts = build(load_config("debug_model.toml", world.size, FLAGS), world)
    rows = parts.datasets.train
    assert isinstance(rows, MixedRows)
    total = Counter[str]()
    tokens = Counter[str]()
    for index in range(BATCH, STEPS * BATCH):
        row = rows.sequence(index)
        batch = Batch(torch.from_numpy(row.tokens)[None], torch.from_numpy(row.labels)[None])
        name = rows.names[rows.locate(index)[0]]
        with torch.no_grad():
            total[name] += parts.train_step.runner.loss_sum(batch).item()
        tokens[name] += int((batch.labels != -100).sum())
    return {f"loss/{name}": total[name] / tokens[name] for name in rows.names}


@pytest.fixture(scope="module")
def by_hand(pool: Pools) -> dict[str, float]:
    return pool(1).run(_by_hand)[0]


PARALLEL = "experimental.context_parallel_degree", "training.tensor_parallel_degree"
COMPILED = ["--training.compile", "--compile.backend=aot_eager", "--compile.components=loss"]


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(
    "flags",
    [
        ["--training.loss_chunks=5", "--no-training.enable_loss_parallel"],
        pytest.param([*COMPILED, "--training.batch_size=6"], marks=pytest.mark.slow),
        pytest.param([f"--{PARALLEL[0]}=2", "--training.loss_chunks=2"], marks=pytest.mark.slow),
        [f"--{PARALLEL[1]}=2", "--training.loss_chunks=4", "--training.batch_size=6"],
        [
            "--experimental.pipeline_parallel_degree=2",
            "--training.batch_size=4",
            "--training.loss_chunks=3",
        ],
    ],
)
def test_it_is_the_mean_over_its_own_targets(
    pool: Pools, by_hand: dict[str, float], tmp_path: Path, flags: list[str]
) -> None:
    first, last = pool(2).run(_run, str(tmp_path), *flags)[0]
    found = {key: value for key, value in last.items() if key.startswith("loss/")}
    assert found == pytest.approx(by_hand, rel=1e-5)
    assert (first["step"], last["step"]) == (1, STEPS)
    assert abs(by_hand["loss/c4_test"] - by_hand["loss/sft_test"]) > 1e-3
    assert len(found) == 2


@pytest.mark.slow
def test_a_resumed_run_counts_from_its_start_and_gradients_are_the_same(
    pool: Pools, tmp_path: Path
) -> None:
    flags = [
        "--optimizer.lr=1e-2",
        "--metrics.log_freq=1",
        "--training.loss_chunks=1",
        "--checkpoint.enable_checkpoint",
    ]
    whole = pool(1).run(_run, str(tmp_path / "whole"), *flags, "--checkpoint.interval=2")[0]
    (tmp_path / "whole/checkpoint/step-4").rename(tmp_path / "gone")
    again = pool(1).run(_run, str(tmp_path / "whole"), *flags)[0]
    keys = ("loss", "grad_norm", "loss/c4_test", "loss/sft_test", "share/sft_test")
    assert [[row[key] for key in keys] for row in again] == [
        [row[key] for key in keys] for row in whole
    ]
    losses = RowLosses(lambda x, y: (x * y).sum(), 4)
    x = torch.arange(24.0).view(3, 8, 1).requires_grad_()
    y = torch.ones(3, 8, 1)
    assert losses(x, y).item() == 276
    assert len(losses.rows) == 6
    with torch.no_grad():
        losses(x, y)
    assert [row.item() for row in losses.rows] == [6, 22, 38, 54, 70, 86]
