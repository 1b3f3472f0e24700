"""The trainer with batches prepared by a thread: the same run, and no thread after it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from titanlite.prepare import resolve_plans

from tests.pool import Pools
from tests.tiny import EIGHT_STEPS
from titanlite import exit_codes
from titanlite.build import read_text
from titanlite.config.load import load_file
from titanlite.data.prefetch import THREAD
from titanlite.metrics.jsonl import read_metrics
from titanlite.parallel.dist_env import DistEnv
from titanlite.trainer import Trainer

ROOT = Path(__file__).resolve().parents[2]
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


def _run(world: DistEnv, folder: str, fails_at: int, *flags: str) -> dict[str, Any]:
    """Train; losses by step, and the threads that were there in mid-run and after it."""
    plans = resolve_plans(load_file("debug_model.toml", [*TINY, f"--job.dump_folder={folder}", *flags]), world.size)
    trainer = Trainer(plans, world, read_text(plans))
    during = set()
    validate = trainer.validate

    def look() -> None:
        validate()
        during.add(_threads())
        if trainer.step == fails_at:
            raise KeyboardInterrupt

    trainer.validate = look  # type: ignore[method-assign]
    stopped = False
    try:
        trainer.train()
    except KeyboardInterrupt:
        stopped = True
    after = _threads()
    rows = read_metrics(Path(folder) / "metrics.jsonl")
    losses = {(row["step"], key): row[key] for row in rows for key in row if "loss" in key}
    return {"losses": losses, "during": during, "after": after, "stopped": stopped}


@pytest.fixture(scope="module")
def plain(pool: Pools, tmp_path_factory: pytest.TempPathFactory) -> dict[Any, Any]:
    """8 steps on 2 ranks without a thread."""
    runs = pool(2).run(_run, str(tmp_path_factory.mktemp("plain")), -1, "--training.steps=8", "--data.prefetch=0")
    assert all(run["during"] == {0} for run in runs)
    assert len(runs[0]["losses"]) >= 8 + 2
    return runs[0]["losses"]


def test_a_run_is_the_same_with_threads_and_leaves_none(pool: Pools, plain: dict[Any, Any], tmp_path: Path) -> None:
    flags = ["--training.steps=8", "--data.prefetch=3", "--data.persistent_workers"]
    runs = pool(2).run(_run, str(tmp_path), -1, *flags)
    for run in runs:
        assert run["during"] == {1, 2}  # training's, and with the first validation the other
        assert run["after"] == 0
    assert runs[0]["losses"] == plain


@pytest.mark.soak
def test_a_run_broken_off_with_steps_in_stock_goes_on_bit_for_bit(
    pool: Pools, plain: dict[Any, Any], tmp_path: Path
) -> None:
    """Broken off at step 5; the checkpoint of step 3 was written while steps 4 to 6 were prepared."""
    for run in pool(2).run(_run, str(tmp_path), 5, "--training.steps=8", "--data.prefetch=3"):
        assert run["stopped"] and run["during"] == {1} and run["after"] == 0
    resumed = pool(2).run(_run, str(tmp_path), -1, "--training.steps=8", "--data.prefetch=3")
    assert resumed[0]["losses"] == plain


@pytest.mark.soak
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_a_run_with_steps_in_stock(tmp_path: Path, number: signal.Signals) -> None:
    with subprocess.Popen(
        [sys.executable, str(ROOT / "train.py"), *TINY, "--training.steps=100000", f"--job.dump_folder={tmp_path}"],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # ignored in a shell's background
    ) as process:
        assert process.stdout is not None
        while "step:" not in (line := process.stdout.readline()):
            assert line
        sent = time.monotonic()
        process.send_signal(number)
        rest, _ = process.communicate(timeout=60)
    assert time.monotonic() - sent < 10
    assert process.returncode == exit_codes.PREEMPTED, rest
    assert "Fatal Python error" not in rest
