"""The check of a resume, in whole runs."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from tests.support.pool import Pools
from tests.support.whole_runs import losses_of, train_run
from titanlite.data.loader import TrainLoader
from titanlite.dist.dist_env import DistEnv


@pytest.fixture(scope="module")
def left(pool: Pools, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on two ranks that was lost at step 6; its checkpoint is of step 4."""
    folder = tmp_path_factory.mktemp("left")
    pool(2).run(train_run, str(folder), "--training.steps=6", "--checkpoint.interval=4")
    shutil.rmtree(folder / "checkpoint" / "step-6")
    return folder


def _resume(
    pool: Pools, ranks: int, left: Path, folder: Path, *flags: str, function: Any = train_run
) -> dict[str, Any]:
    shutil.copytree(left, folder)
    found: dict[str, Any] = pool(ranks).run(function, str(folder), *flags, "--training.steps=6")[0]
    return found


def _line(found: dict[str, Any]) -> str:
    (line,) = [line for line in found["said"] if line.lower().startswith("resume ")]
    return str(line)


def test_a_run_that_goes_on_on_other_ranks_is_verified(
    pool: Pools, left: Path, tmp_path: Path
) -> None:
    assert _line(_resume(pool, 1, left, tmp_path / "run")) == (
        "resume verified at step 4: every file is as it was written; the next batch is the one "
        "that was to come"
    )


def _late(world: DistEnv, folder: str, *flags: str) -> dict[str, Any]:
    """A run whose loader begins one step later than it was told."""
    move = TrainLoader.load_state_dict

    def late(self: TrainLoader, state: dict[str, int]) -> None:
        move(self, {"next_sequence": state["next_sequence"] + 8})

    with patch.object(TrainLoader, "load_state_dict", late):
        return train_run(world, folder, *flags, "--data.prefetch=0")


@pytest.mark.slow
def test_a_skipped_batch_is_found(pool: Pools, left: Path, tmp_path: Path) -> None:
    found = _line(_resume(pool, 2, left, tmp_path / "run", function=_late))
    assert found.startswith("RESUME NOT VERIFIED at step 4: every file is as it was written;")
    assert found.endswith("the next batch is not the one that was to come then")


@pytest.mark.slow
def test_schedule_and_text_can_begin_anew(pool: Pools, left: Path, tmp_path: Path) -> None:
    anew = "--checkpoint.exclude_from_loading=lr_scheduler,dataloader"
    found = _resume(pool, 2, left, tmp_path / "run", anew, "--checkpoint.interval=5")
    before = losses_of(
        json.loads(line) for line in (left / "metrics.jsonl").read_text().splitlines()
    )  # type: ignore[arg-type]
    now = losses_of(found["rows"])
    assert [now[step][2] for step in (5, 6)] == [before[step][2] for step in (1, 2)]
    assert any("but with new schedule, text" in line for line in found["said"])
    assert _line(found).endswith("the next batch is another one, as allowed: dataloader")
    shutil.rmtree(tmp_path / "run" / "checkpoint" / "step-6")
    again = pool(2).run(train_run, str(tmp_path / "run"), "--training.steps=6", anew)[0]
    assert losses_of(again["rows"])[6] == now[6], "the schedule and the text continue"
    assert _line(again).endswith("the next batch is the one that was to come")
