"""One training step, top to bottom, and validation's step.

Plain functions over plain arguments, so that a custom loop can take them one by one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from titanlite.guard import FiniteGuard
from titanlite.loss import count_valid, cross_entropy_sum
from titanlite.optim.optimizer import gated_step
from titanlite.parallel.fsdp import set_gradient_sync

if TYPE_CHECKING:
    from titanlite.data.loader import Batch


class StepResult(NamedTuple):
    """Device tensors (0-dim) of one step; reading them is the logger's business."""

    #: Mean loss in nats per valid token, over all ranks.
    loss: torch.Tensor
    #: This rank's share of `loss` divided by its share of the tokens: its own mean loss.
    local_loss: torch.Tensor
    #: Global gradient norm before clipping.
    norm: torch.Tensor


def forward_backward(
    model: nn.Module, micro_batches: Sequence[Batch], tokens: torch.Tensor, sync_every: bool = False
) -> torch.Tensor:
    """Accumulate gradients of the step's loss; returns this rank's share of it (0-dim, detached).

    tokens: valid tokens of the whole step over all ranks and micro-batches, so that shares simply add up.
    sync_every: reduce gradients over ranks with each micro-batch (less memory) instead of with the last (less traffic).
    """
    share = torch.zeros((), device=tokens.device)
    for index, batch in enumerate(micro_batches):
        set_gradient_sync(model, sync_every or index == len(micro_batches) - 1)
        loss = cross_entropy_sum(model(batch.tokens), batch.labels) / tokens
        loss.backward()
        share += loss.detach()
    return share


def local_gradients(parameters: Iterable[nn.Parameter]) -> list[torch.Tensor]:
    """This rank's part of every gradient, as plain tensors."""
    gradients = (p.grad for p in parameters)
    return [g.to_local() if isinstance(g, DTensor) else g for g in gradients if g is not None]


def train_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    micro_batches: Sequence[Batch],
    *,
    step: int,
    lr: float,
    max_norm: float,
    guard: FiniteGuard,
    replicas: int = 1,
    sync_every: bool = False,
) -> StepResult:
    """One optimizer step on the global batch of which `micro_batches` is this rank's part, on the model's device.

    step: number of the step, from 1. max_norm: gradients are scaled down to this global norm.
    replicas: data-parallel ranks that hold the same shard of each gradient.
    Issues two collectives besides FSDP's: the token count, and the norm together with the loss. Nothing waits for the
    device.
    """
    local_tokens = torch.stack([count_valid(b.labels) for b in micro_batches]).sum()
    tokens = local_tokens.clone()
    dist.all_reduce(tokens)
    tokens.clamp_(min=1)  # a step of nothing but padding has loss zero, not NaN

    share = forward_backward(model, micro_batches, tokens, sync_every)

    gradients = local_gradients(model.parameters())
    local_norm = torch.nn.utils.get_total_norm(gradients)
    sums = torch.stack([local_norm.float().square() / replicas, share])
    dist.all_reduce(sums)
    norm, loss = sums[0].sqrt(), sums[1]
    local_loss = share * tokens / local_tokens.clamp(min=1)

    ok = guard.gate(step, norm, loss, share)
    torch._foreach_mul_(gradients, (max_norm / (norm + 1e-6)).clamp(max=1.0))
    gated_step(optimizer, ok, lr)
    optimizer.zero_grad(set_to_none=True)
    return StepResult(loss, local_loss, norm)


@torch.no_grad()
def validate(model: nn.Module, batches: Iterable[Batch], device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean loss in nats per token over all ranks' `batches`, and the number of tokens (0-dim float64 tensors).

    Every rank must bring the same number of batches; tokens weigh equally wherever they are.
    """
    sums = torch.zeros(2, dtype=torch.float64, device=device)
    model.eval()
    for batch in batches:
        tokens, labels = batch.tokens.to(device), batch.labels.to(device)
        sums[0] += cross_entropy_sum(model(tokens), labels)
        sums[1] += count_valid(labels)
    model.train()
    dist.all_reduce(sums)
    return sums[0] / sums[1], sums[1]
