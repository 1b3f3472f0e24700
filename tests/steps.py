"""A training step as one call, for tests that train a model of their own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from titanlite.data.loader import Batch
from titanlite.guard import FiniteGuard
from titanlite.loss import cross_entropy_sum
from titanlite.step import PlainRunner, ReplicationFactors, Runner, StepResult, TrainStep


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
    factors: ReplicationFactors = ReplicationFactors(),  # noqa: B008 (immutable)
    stop: bool = False,
    layer_norms: bool = False,
    before_update: Callable[[], object] | None = None,
    after_update: Callable[[], object] | None = None,
) -> StepResult:
    """Take one `TrainStep`. pipeline: runs the model in place of a `PlainRunner`."""
    runner = pipeline or PlainRunner(model, loss_function, sync_every)
    take = TrainStep(model, optimizer, runner, guard, max_norm, factors, layer_norms)
    take.before_update = before_update or take.before_update
    take.after_update = after_update or take.after_update
    return take(batches, step, lr, stop)


def forward_backward(
    model: nn.Module,
    batches: Sequence[Batch],
    tokens: torch.Tensor,
    sync_every: bool = False,
    loss_function: Any = cross_entropy_sum,
) -> torch.Tensor:
    """Accumulate the gradients of a step; return this rank's share of the loss."""
    return PlainRunner(model, loss_function, sync_every).forward_backward(batches, tokens)
