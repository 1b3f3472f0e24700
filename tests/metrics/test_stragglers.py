"""The rank that the others wait for is named, whether its data or its computing is slow."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.support.pool import Pools
from tests.support.stand_ins import burn
from tests.support.whole_runs import make_trainer
from titanlite.dist.dist_env import DistEnv
from titanlite.metrics.stragglers import LOGS_IN_A_ROW, StragglerDetector
from titanlite.runs.lines import read_metrics

CPU = torch.device("cpu")
#: Seconds per step by which a rank is slowed: far above what a busy machine adds to one rank and
#: not to the other.
SLOW = 0.3


def _train(world: DistEnv, folder: str, slow_rank: int) -> None:
    flags = ["--no-checkpoint.enable_checkpoint", "--no-validation.enable", "--training.steps=6"]
    trainer = make_trainer(world, folder, *flags)
    if world.rank == slow_rank:
        block = trainer.parts.model.get_submodule("layers.1")
        # 8 sequences in micro-batches of 2 on 2 ranks: twice a step.
        block.register_forward_hook(lambda *_: burn(SLOW / 2))
    trainer.train()


@pytest.mark.slow
def test_the_slow_rank_is_named(pool: Pools, tmp_path: Path) -> None:
    slow_rank = 1
    pool(2).run(_train, str(tmp_path), slow_rank)
    rows = [row for row in read_metrics(tmp_path / "metrics.jsonl") if row["step"] > 1]
    assert len(rows) == 5
    assert [row["slowest_rank"] for row in rows].count(slow_rank) >= 4
    lags = sorted(row["lag_seconds"] for row in rows)
    assert 0.5 * SLOW < lags[2] < 2 * SLOW
    assert sorted(row["lag_percent"] for row in rows)[2] > 20
    # Rank 0 does not wait for its own data.
    assert sorted(row["data_seconds"] for row in rows)[2] < 0.5 * SLOW


def test_ranks_are_compared_with_the_median() -> None:
    figures, _ = StragglerDetector(CPU).compare([1.0, 1.1, 1.0, 0.8], [0.0, 0.1, 0.5, 0.1], 2.0)
    assert figures == pytest.approx(
        {"slowest_rank": 2, "fastest_rank": 3, "lag_seconds": 0.5, "lag_percent": 50}
    )


def test_on_a_gpu_the_step_without_data_is_scaled_by_the_time_of_the_head() -> None:
    detector = StragglerDetector(torch.device("cuda", 0))
    figures, _ = detector.compare([0.010, 0.010, 0.015], [0.2, 0.2, 0.2], 1.2)  # own: 1.2, 1.2, 1.7
    assert figures["slowest_rank"] == 2
    assert figures["lag_seconds"] == pytest.approx(0.5)
    # Without a head (a pipeline stage has none) only the data tell.
    figures, _ = detector.compare([0.0, 0.0], [0.1, 0.4], 1.1)
    assert figures["slowest_rank"] == 1
    assert figures["lag_seconds"] == pytest.approx(0.3)


def test_a_rank_that_stays_behind_is_warned_of_once_in_a_while() -> None:
    detector = StragglerDetector(CPU)
    behind = ([1.0, 1.3], [0.0, 0.1])
    other = ([1.3, 1.0], [0.0, 0.0])
    fine = ([1.1, 1.0], [0.0, 0.0])
    said = [detector.compare(*behind, 2.0)[1] for _ in range(LOGS_IN_A_ROW + 100)]
    assert [number for number, text in enumerate(said, 1) if text] == [5, 55, 105]
    assert "rank 1 is behind" in said[4]
    assert "40 % more" in said[4]
    # Now one, now the other: nobody is consistently behind.
    assert not any(detector.compare(*ranks, 2.0)[1] for ranks in (fine, other, behind) * 10)
