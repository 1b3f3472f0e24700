"""A training step as one call, for tests with their own model; and a whole run on ranks of the
pool.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from titanlite.assembly.build import build
from titanlite.data.loader import Batch
from titanlite.dist.dist_env import DistEnv
from titanlite.loss import cross_entropy_sum
from titanlite.optim.guard import FiniteGuard
from titanlite.resolve.load import load_config
from titanlite.runs.read_jsonl import read_lines
from titanlite.step import PlainRunner, Runner, StepResult, TrainStep
from titanlite.trainer import Trainer


def train_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batches: Sequence[Batch],
    *,
    step: int,
    lr: float,
    max_norm: float,
    guard: FiniteGuard,
    sync_every: bool = False,
    loss_function: Any = cross_entropy_sum,
    pipeline: Runner | None = None,
    **more: Any,
) -> StepResult:
    """Take one `TrainStep`.

    pipeline: runs the model in place of a `PlainRunner`. more: of `TrainStep`, if not None.
    """
    runner = pipeline or PlainRunner(model, loss_function, sync_every)
    given = {name: value for name, value in more.items() if value is not None}
    return TrainStep(model, optimizer, runner, guard, max_norm, **given)(batches, step, lr)


def train_rows(
    world: DistEnv, folder: str, *flags: str, config: str = "debug_model.toml", **more: Any
) -> list[dict[str, Any]]:
    """Train in this folder; return the rows of metrics.jsonl. more: for `build`."""
    run = load_config(config, world.size, [*flags, f"--job.dump_folder={folder}"])
    Trainer(build(run, world, **more)).train()
    return written_rows(world, folder)


def written_rows(world: DistEnv, folder: str) -> list[dict[str, Any]]:
    """Return the rows of metrics.jsonl, if there are any, once all ranks have come here: rank 0
    writes them, and the others may be done before.
    """
    if world.size > 1:
        dist.barrier()
    return read_lines(Path(folder) / "metrics.jsonl")
