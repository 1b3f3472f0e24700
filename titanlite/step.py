"""One training step, top to bottom.

step_fn = TrainStep(model, optimizer, PlainRunner(model), FiniteGuard(device), max_norm=1.0)
result = step_fn(micro_batches, step, lr)
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import nn

from titanlite.data.loader import Batch
from titanlite.loss import LossFunction, batch_loss, count_valid, cross_entropy_sum
from titanlite.optim.gradients import (
    clip_divisor,
    clip_gradients,
    square_sum,
    square_sums,
)
from titanlite.optim.guard import FiniteGuard
from titanlite.optim.optimizer import divides_gradients, gated_step, to_host
from titanlite.parallel.fsdp import set_gradient_sync

if TYPE_CHECKING:
    from titanlite.features.experts.balance import ExpertBalance
    from titanlite.optim.in_backward import StepInBackward

#: Is told the name of the phase that begins: "forward", "backward", "pipeline", "optimizer".
Phase = Callable[[str], object]


class StepResult(NamedTuple):
    """Tensors of one step, 0-dim on the device: reading one waits for the device."""

    #: Mean loss in nats per valid token, over all ranks.
    loss: torch.Tensor
    #: Mean loss over this rank's own tokens.
    local_loss: torch.Tensor
    #: Global gradient norm before clipping.
    grad_norm: torch.Tensor
    #: The same by layer (`titanlite.optim.gradients.layer_of`); empty unless
    #: `TrainStep.layer_norms`.
    layer_norms: dict[str, torch.Tensor]
    #: Whether the weights were updated (bool).
    good: torch.Tensor


class ReplicationFactors(NamedTuple):
    """How many ranks contribute the same to a sum over all ranks."""

    #: Ranks with the same tokens: tensor-parallel and pipeline ranks.
    tokens: int = 1
    #: Ranks with the same loss: tensor-parallel ranks. In a pipeline only the last stage has a
    #: loss.
    loss: int = 1


def do_nothing(*_: object) -> None:
    """Default of the hooks of a step."""


class Runner(Protocol):
    """Runs a model: `PlainRunner`, or `titanlite.features.pipeline.runner.Pipeline`."""

    def forward_backward(
        self, batches: Sequence[Batch], tokens: torch.Tensor, phase: Phase = ...
    ) -> torch.Tensor:
        """Accumulate gradients of the step's loss; return this rank's share of it (0-dim,
        detached).

        tokens: valid tokens of the whole step over all ranks and micro-batches, so shares add up to
        the mean loss.
        """
        ...

    def loss_sum(self, batch: Batch, loss: LossFunction | None = None) -> torch.Tensor:
        """Return a batch's loss, summed over its tokens (0-dim); `loss` replaces the run's."""
        ...


@dataclass
class PlainRunner:
    """Runs a whole model, one micro-batch after the other.

    loss_function: `cross_entropy_sum`, or the same compiled. sync_every: reduce gradients over
    ranks with every micro-batch (less memory) instead of with the last (less traffic).
    """

    model: nn.Module
    loss_function: LossFunction = cross_entropy_sum
    sync_every: bool = False

    def forward_backward(
        self, batches: Sequence[Batch], tokens: torch.Tensor, phase: Phase = do_nothing
    ) -> torch.Tensor:
        """Add the gradients of all batches; return this rank's share of the loss, a scalar.

        tokens: targets of the step on all ranks, a scalar.
        """
        share = torch.zeros((), dtype=torch.float32, device=tokens.device)
        for index, batch in enumerate(batches):
            set_gradient_sync(self.model, self.sync_every or index == len(batches) - 1)
            phase("forward")
            loss = self.loss_sum(batch) / tokens
            phase("backward")
            loss.backward()
            share += loss.detach()
        return share

    def loss_sum(self, batch: Batch, loss: LossFunction | None = None) -> torch.Tensor:
        """Return the sum of the losses of a batch's targets, a scalar."""
        loss = loss or self.loss_function
        return batch_loss(self.model, batch.tokens, batch.labels, loss, batch.documents)


@dataclass
class TrainStep:
    """Takes one optimizer step per call. `titanlite.build` makes one from a config.

    Args:
        max_norm: gradients are scaled down to this global norm.
        factors: for sums over all ranks.
        layer_norms: also compute the gradient norm of each layer. May change between steps, on all
            ranks at once.
        before_update: is called before weights and moments change.
        after_update: is called when the weights are new
            (`titanlite.features.float8.gathered.ScalePrecompute`).
        phase: is told what begins, for the hang watchdog.
        in_backward: updates parameters during the backward pass; then no gradient is clipped or
            held back.
        balance: moves the biases of experts after the update.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    runner: Runner
    guard: FiniteGuard
    max_norm: float
    factors: ReplicationFactors = ReplicationFactors()
    layer_norms: bool = False
    before_update: Callable[[], object] = do_nothing
    after_update: Callable[[], object] = do_nothing
    phase: Phase = do_nothing
    in_backward: StepInBackward | None = None
    balance: ExpertBalance | None = None

    def __post_init__(self) -> None:
        """Raise ParallelismError for a model that ranks with other tokens would train apart."""
        ranks = dist.get_world_size() // self.factors.tokens if dist.is_initialized() else 1
        if ranks > 1:
            from titanlite.parallel.gradient_sum_check import check_summed

            check_summed(self.model, ranks)

    def __call__(
        self, batches: Sequence[Batch], step: int, lr: float, stop: bool = False
    ) -> StepResult:
        """Train on the global batch of which `batches` are this rank's micro-batches, on the
        model's device.

        step: its number, from 1. stop: this rank was asked to stop; `guard.poll` then tells it on
        all ranks.
        Issues two collectives besides FSDP's: the token count, and the loss with the norm. A
        balance of experts has one more. Nothing waits for the device, except an optimizer whose
        gradients are in host memory.
        """
        self._begin()
        local_tokens = torch.stack([count_valid(batch.labels) for batch in batches]).sum()
        # The stop flag is sent with the token count: integer sums do not depend on order, so losses
        # stay bit-exact.
        counts = torch.stack([local_tokens, torch.full_like(local_tokens, stop)])
        dist.all_reduce(counts)
        tokens = counts[0]
        stops = counts[1] > 0
        tokens.div_(self.factors.tokens, rounding_mode="floor")
        tokens.clamp_(min=1)  # a step of padding alone has loss zero, not NaN

        early = self.in_backward
        with early.at(lr, self.before_update) if early else contextlib.nullcontext():
            share = self.runner.forward_backward(batches, tokens, self.phase)
        self.phase("optimizer")
        layers = square_sums(self.model, share.device) if self.layer_norms else {}
        square = (early or self).square_sum(share.device)
        sums = torch.stack([share / self.factors.loss, square, *layers.values()])
        dist.all_reduce(sums)
        loss = sums[0]
        norm = sums[1].sqrt()

        # A flag on the device: nothing waits for it.
        ok = self.guard.check(step, norm, loss, share, stops)
        if early is None:
            self._update(norm, ok, lr)
        self._finish(ok)
        local_loss = share * tokens / local_tokens.clamp(min=1)
        layer_norms = dict(zip(layers, sums[2:].sqrt(), strict=True))
        return StepResult(loss, local_loss, norm, layer_norms, ok)

    def _begin(self) -> None:
        self.phase("forward")
        if self.balance is not None:
            self.balance.begin()

    def _finish(self, ok: torch.Tensor) -> None:
        if self.balance is not None:
            self.balance.update(ok)
        self.after_update()

    def square_sum(self, device: torch.device) -> torch.Tensor:
        """Return this rank's share of the squared gradient norm."""
        return square_sum(self.model.parameters(), device)

    def _update(self, norm: torch.Tensor, ok: torch.Tensor, lr: float) -> None:
        """Clip the gradients, take the optimizer's step if `ok` is set, and free the gradients."""
        divisor = None
        # On a CPU the product stays, which rounds differently: its runs are repeated bit by bit.
        # `before_update` is promised clipped gradients.
        inside = norm.device.type == "cuda" and self.before_update is do_nothing
        if norm.device.type != next(self.model.parameters()).device.type:
            # An update in host memory begins when the norm over all ranks is known.
            norm, ok = to_host(norm, ok)
        if inside and divides_gradients(self.optimizer):
            divisor = clip_divisor(norm, self.max_norm)
        else:
            clip_gradients(self.model.parameters(), norm, self.max_norm)
        self.before_update()
        gated_step(self.optimizer, ok, lr, divisor)
        self.optimizer.zero_grad(set_to_none=True)
        self.model.zero_grad(set_to_none=True)  # also of weights that the optimizer does not hold
