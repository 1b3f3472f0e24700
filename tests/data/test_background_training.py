"""The trainer with batches prepared by a thread: the same run, and no thread after it."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from tests.pool import Pools
from tests.tiny import EIGHT_STEPS
from titanlite.build import build
from titanlite.config.fit import load_config
from titanlite.data.prefetch import THREAD
from titanlite.metrics.jsonl import read_metrics
from titanlite.parallel.dist_env import DistEnv
from titanlite.trainer import Trainer

TINY = [
    *EIGHT_STEPS,
    "--validation.enable",
    "--validation.freq=4",
    "--validation.steps=3",
    "--validation.batch_size=2",
    "--validation.seq_len=16",
    "--checkpoint.enable_checkpoint",
    "--checkpoint.interval=3",
]


def _threads() -> int:
    return sum(thread.name == THREAD for thread in threading.enumerate())


def _run(world: DistEnv, folder: str, *flags: str) -> dict[str, Any]:
    """Train; return losses by step, and the number of threads in mid-run and after it."""
    run = load_config("debug_model.toml", world.size, [*TINY, f"--job.dump_folder={folder}", *flags])
    trainer = Trainer(build(run, world))
    during = set()
    validate = trainer.validate

    def look() -> None:
        validate()
        during.add(_threads())

    trainer.validate = look  # type: ignore[method-assign]
    trainer.train()
    after = _threads()
    rows = read_metrics(Path(folder) / "metrics.jsonl")
    losses = {(row["step"], key): row[key] for row in rows for key in row if "loss" in key}
    return {"losses": losses, "during": during, "after": after}


@pytest.mark.slow
def test_a_run_is_the_same_with_threads_and_leaves_none(pool: Pools, tmp_path: Path) -> None:
    plain = pool(2).run(_run, str(tmp_path / "plain"), "--training.steps=8", "--data.prefetch=0")
    flags = ["--training.steps=8", "--data.prefetch=3", "--data.persistent_workers"]
    runs = pool(2).run(_run, str(tmp_path / "threads"), *flags)
    for run in runs:
        assert run["during"] == {1, 2}  # training's, and with the first validation the other
        assert run["after"] == 0
    assert all(run["during"] == {0} for run in plain)
    assert runs[0]["losses"] == plain[0]["losses"] and len(plain[0]["losses"]) >= 8 + 2
