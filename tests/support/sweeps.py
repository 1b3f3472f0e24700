"""Sweeps of runs that take a second: shared by their tests."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.support.processes import titanlite
from tests.support.tiny import size
from titanlite.contrib.lab.members import Member
from titanlite.runs.read_jsonl import read_metrics

CALLBACKS = Path(__file__).with_name("slow_steps.py")
STEPS = 8
#: Eight steps of a model of two layers; a checkpoint after each second one.
CONFIG = [
    "--job.config_file=debug_model.toml",
    *size(32, 2, 2, 16),
    "--training.batch_size=2",
    f"--training.steps={STEPS}",
    "--training.warmup_steps=2",
    "--metrics.log_freq=1",
    "--validation.freq=4",
    "--validation.steps=1",
    "--validation.batch_size=2",
    "--validation.seq_len=16",
    "--checkpoint.enable_checkpoint",
    "--checkpoint.interval=2",
    f"--job.callbacks={CALLBACKS}:SlowSteps",
]
SMALL = Member("small", ["--optimizer.lr=1e-3"])
LARGE = Member("large", ["--optimizer.lr=1e-2"])
#: Its loss is not finite.
HUGE = Member("huge", ["--optimizer.lr=1e9"])
BROKEN = Member("broken", [f"--job.callbacks={CALLBACKS}:Breaks"])


def run_copy(command: Sequence[str], console: Path, **more: Any) -> int:
    """In place of `titanlite.contrib.processes.run`: a copy of a process that has torch already."""
    done = titanlite(*command[command.index("train") :], env=more["environment"])
    console.write_text(done.stdout + done.stderr)
    return done.returncode


def rows(folder: Path) -> list[tuple[Any, ...]]:
    """What a run has learnt, step by step, without times."""
    kept = ("step", "loss", "grad_norm", "lr", "tokens_seen", "validation_loss")
    return [
        tuple((name, row[name]) for name in kept if name in row)
        for row in read_metrics(folder / "metrics.jsonl")
    ]


def attempts(folder: Path) -> str:
    """The record of a run's starts and ends."""
    return (folder / "attempts.jsonl").read_text()
