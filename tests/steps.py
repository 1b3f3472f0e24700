"""A training step as one call, for tests that train a model of their own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from titanlite.data.loader import Batch
from titanlite.guard import FiniteGuard
from titanlite.loss import cross_entropy_sum
from titanlite.step import PlainRunner, Runner, StepResult, TrainStep


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
    """Take one `TrainStep`. pipeline: runs the model in place of a `PlainRunner`. more: of `TrainStep`, if not None."""
    runner = pipeline or PlainRunner(model, loss_function, sync_every)
    given = {name: value for name, value in more.items() if value is not None}
    return TrainStep(model, optimizer, runner, guard, max_norm, **given)(batches, step, lr)
