"""Validation by the place of a target in its sequence (`validation.parts`)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tests.support.pool import Pools
from tests.support.refusals import refusal
from tests.support.whole_runs import make_trainer
from titanlite.dist.dist_env import DistEnv

FLAGS = [
    "--validation.enable",
    "--validation.steps=2",
    "--validation.seq_len=48",
    "--training.seq_len=48",
    "--validation.batch_size=2",
    "--training.global_batch_size=4",
    "--training.batch_size=1",
    "--model.overrides.n_layers=2",
]
#: Parts of 9 and 10 targets.
PARTS = 5
BORDERS = [0, 9, 19, 28, 38, 48]


def _measured(world: DistEnv, folder: str, *flags: str) -> list[tuple[float, int]]:
    """Losses of the whole text, then of each part."""
    parts = make_trainer(world, folder, *FLAGS, *flags).parts
    assert parts.validation is not None
    result = parts.validation.measure(
        parts.model, world.device, parts.train_step.runner, parts.train_step.factors
    )
    return [(one.loss, one.tokens) for one in (result.all, *result.parts)]


def _by_hand(world: DistEnv, folder: str) -> list[tuple[float, int]]:
    """The same, from the logits of the whole batches."""
    parts = make_trainer(world, folder, *FLAGS).parts
    assert parts.validation is not None
    losses: list[Any] = []
    for _, batch in parts.validation:
        with torch.no_grad():
            logits = parts.model(batch.tokens).float()
        losses.append(F.cross_entropy(logits.transpose(1, 2), batch.labels, reduction="none"))
    each = torch.cat(losses).double()
    spans = [(0, 48), *zip(BORDERS, BORDERS[1:], strict=False)]
    return [(float(each[:, a:b].mean()), each[:, a:b].numel()) for a, b in spans]


@pytest.mark.slow_after(2)
@pytest.mark.parametrize(
    ("ranks", "flags"),
    [
        (1, []),
        (1, ["--training.loss_chunks=4"]),
        (2, ["--experimental.context_parallel_degree=2"]),
        (2, ["--training.tensor_parallel_degree=2"]),
        pytest.param(
            2,
            ["--experimental.pipeline_parallel_degree=2", "--training.batch_size=4"],
            marks=pytest.mark.slow,
        ),
    ],
    ids=["one rank", "chunks", "context", "tensor", "pipeline"],
)
def test_losses_by_part_are_those_of_the_logits_in_every_layout(
    pool: Pools, tmp_path: Any, ranks: int, flags: list[str]
) -> None:
    expected = pool(1).run(_by_hand, str(tmp_path / "plain"))[0]
    for found in pool(ranks).run(
        _measured, str(tmp_path / "parts"), f"--validation.parts={PARTS}", *flags
    ):
        assert [tokens for _, tokens in found] == [tokens for _, tokens in expected]
        assert [loss for loss, _ in found] == pytest.approx([loss for loss, _ in expected], 1e-5)
    assert len({round(loss, 3) for loss, _ in expected}) > 3


def _logged(world: DistEnv, folder: str, *flags: str) -> tuple[list[dict[str, Any]], list[str]]:
    from tests.support.whole_runs import outcome_of

    trainer = make_trainer(world, folder, *FLAGS, "--training.steps=1", *flags)
    found = outcome_of(trainer, folder)
    return [row for row in found["rows"] if "validation_loss" in row], found["said"]


@pytest.mark.slow
def test_a_run_logs_parts_only_if_it_is_asked(pool: Pools, tmp_path: Any) -> None:
    (plain,), _ = pool(1).run(_logged, str(tmp_path / "plain"))[0]
    (row,), said = pool(1).run(_logged, str(tmp_path / "parts"), "--validation.parts=2")[0]
    names = ["validation/part_1_of_2/loss", "validation/part_2_of_2/loss"]
    assert [name for name in row if "part" in name] == names
    assert not [name for name in plain if "part" in name]
    assert row["validation_loss"] == pytest.approx(plain["validation_loss"], rel=1e-6)
    mean = sum(row[name] for name in names) / 2
    assert row["validation_loss"] == pytest.approx(mean, rel=1e-6)
    assert any("part 2 of 2 of the sequence: loss" in line for line in said)


@pytest.mark.parametrize(
    ("flags", "key"),
    [
        (["--validation.seq_len=8", "--validation.parts=9"], "validation.parts"),
        (
            ["--stall.deadline_seconds=100", "--comm.train_timeout_seconds=100"],
            "stall.deadline_seconds",
        ),
    ],
)
def test_numbers_without_a_meaning_are_refused(flags: list[str], key: str) -> None:
    assert refusal(["--job.config_file=debug_model.toml", *flags]).key == key
