"""One training step, top to bottom, and validation's step.

Plain functions over plain arguments, so that a custom loop can take them one by one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from titanlite.guard import FiniteGuard
from titanlite.loss import batch_loss, count_valid, cross_entropy_sum
from titanlite.optim.optimizer import gated_step
from titanlite.parallel.fsdp import set_gradient_sync
from titanlite.parallel.pipeline import PipelineModel

if TYPE_CHECKING:
    from titanlite.data.loader import Batch
    from titanlite.parallel.compile import LossFunction
    from titanlite.parallel.pipeline import Pipeline


class StepResult(NamedTuple):
    """Device tensors (0-dim) of one step; reading them is the logger's business."""

    #: Mean loss in nats per valid token, over all ranks.
    loss: torch.Tensor
    #: This rank's share of `loss` divided by its share of the tokens: its own mean loss.
    local_loss: torch.Tensor
    #: Global gradient norm before clipping.
    norm: torch.Tensor
    #: The same by layer (`layer_of`), where it was asked for.
    layer_norms: dict[str, torch.Tensor] | None = None


def unwatched(phase: str) -> None:
    """Nobody wants to know what a step is at."""


def forward_backward(
    model: nn.Module,
    micro_batches: Sequence[Batch],
    tokens: torch.Tensor,
    sync_every: bool = False,
    loss_function: LossFunction = cross_entropy_sum,
    phase: Callable[[str], object] = unwatched,
) -> torch.Tensor:
    """Accumulate gradients of the step's loss; returns this rank's share of it (0-dim, detached).

    tokens: valid tokens of the whole step over all ranks and micro-batches, so that shares simply add up.
    sync_every: reduce gradients over ranks with each micro-batch (less memory) instead of with the last (less traffic).
    loss_function: `cross_entropy_sum`, or what computes the same (compiled).
    phase: as in `train_step`.
    """
    share = torch.zeros((), dtype=torch.float32, device=tokens.device)
    for index, batch in enumerate(micro_batches):
        set_gradient_sync(model, sync_every or index == len(micro_batches) - 1)
        phase("forward")
        loss = batch_loss(model, batch.tokens, batch.labels, loss_function) / tokens
        phase("backward")
        loss.backward()
        share += loss.detach()
    return share


class Duplicates(NamedTuple):
    """How many ranks bring the same to a sum over all ranks."""

    #: The same tokens: tensor-parallel and pipeline ranks.
    tokens: int = 1
    #: The same loss: tensor-parallel ranks. Of a pipeline only the last stage has one.
    loss: int = 1


def local_gradients(parameters: Iterable[nn.Parameter]) -> list[torch.Tensor]:
    """This rank's part of every gradient, as plain tensors."""
    gradients = (p.grad for p in parameters)
    return [g.to_local() if isinstance(g, DTensor) else g for g in gradients if g is not None]


#: Elements of a CPU tensor whose squares are added up in one float32: with many more, small squares get lost.
_NORM_PIECE = 2**16


def total_norm(tensors: Iterable[torch.Tensor]) -> torch.Tensor:
    """Euclidean norm of the elements of all tensors (0-dim float32); all tensors must be on one device.

    torch adds up the squares of a whole CPU tensor in one chain of float32: at 2^28 elements 2 to 4 % are missing.
    So CPU tensors are summed in pieces, of which no copy is made. GPU kernels sum in parts anyway.
    """
    pieces: list[torch.Tensor] = []
    for tensor in tensors:
        pieces += tensor.reshape(-1).split(_NORM_PIECE) if tensor.device.type == "cpu" else [tensor]
    if not pieces:
        return torch.zeros((), dtype=torch.float32)
    norms = torch.stack(torch._foreach_norm(pieces, 2, torch.float32))
    return torch.linalg.vector_norm(norms, dtype=torch.float64).float()


def square_norm(parameters: Iterable[nn.Parameter], device: torch.device) -> torch.Tensor:
    """This rank's share of the squared norm of all gradients (0-dim float32 on `device`): shares add up over ranks.

    What several ranks hold alike counts for each of them in part.
    """
    by_copies: dict[int, list[nn.Parameter]] = {}
    for parameter in parameters:
        by_copies.setdefault(_copies(parameter), []).append(parameter)
    shares = [total_norm(local_gradients(group)).to(device).square() / copies for copies, group in by_copies.items()]
    return torch.stack(shares).sum() if shares else torch.zeros((), dtype=torch.float32, device=device)


def _copies(parameter: nn.Parameter) -> int:
    """Ranks that hold the same part of a parameter."""
    if not isinstance(parameter, DTensor):
        return 1
    sizes = zip(parameter.placements, parameter.device_mesh.shape, strict=True)
    return math.prod(size for placement, size in sizes if placement.is_replicate())


def layer_of(name: str) -> str:
    """The layer that a parameter or module counts to: `layers.3` for what is in a block, else the top-level module."""
    parts = [part for part in name.split(".") if not part.startswith("_")]  # wrappers' names begin with one
    return ".".join(parts[: 2 if parts[0] == "layers" else 1])


def square_norms(model: nn.Module, device: torch.device) -> dict[str, torch.Tensor]:
    """`square_norm` of each layer, in model order; zero for what is on other ranks of a pipeline."""
    layers: dict[str, list[nn.Parameter]] = {}
    if isinstance(model, PipelineModel):
        layers = {name: [] for name in model.layout.trained}
    for name, parameter in model.named_parameters():
        layers.setdefault(layer_of(name), []).append(parameter)
    return {layer: square_norm(parameters, device) for layer, parameters in layers.items()}


def train_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    micro_batches: Sequence[Batch],
    *,
    step: int,
    lr: float,
    max_norm: float,
    guard: FiniteGuard,
    duplicates: Duplicates = Duplicates(),  # noqa: B008 (immutable)
    sync_every: bool = False,
    loss_function: LossFunction = cross_entropy_sum,
    layer_norms: bool = False,
    pipeline: Pipeline | None = None,
    before_update: Callable[[], None] | None = None,
    after_update: Callable[[], None] | None = None,
    stop: bool = False,
    void: bool = False,
    phase: Callable[[str], object] = unwatched,
) -> StepResult:
    """One optimizer step on the global batch of which `micro_batches` is this rank's part, on the model's device.

    step: number of the step, from 1. max_norm: gradients are scaled down to this global norm.
    duplicates: for what is summed over all ranks though some bring the same.
    layer_norms: also give the gradient norm of each layer; it travels with the others.
    pipeline: runs the stages of `model`, a `PipelineModel`, with a loss function of its own.
    before_update: called when weights and moments are about to change (`Checkpointer.await_copy`).
    after_update: called when the weights are new (`titanlite.parallel.float8.ScalePrecompute`).
    stop: this rank was asked to stop; `guard.watch` then says so on all ranks. The step itself is done as ever.
    void: this rank has no data: what it brings stands for nothing, and the step changes nothing on any rank.
    phase: called with the name of what begins (`HangWatchdog.phase`).
    Issues two collectives besides FSDP's: the token count, and the norm together with the loss. Nothing waits for the
    device, unless gradients are in host memory: then the optimizer does.
    """
    phase("forward")
    local_tokens = torch.stack([count_valid(b.labels) for b in micro_batches]).sum()
    # The wish to stop travels with the counts and not with the loss: the sum of whole numbers is exact, however it is
    # ordered, so no float depends on it. (Through the store one would have to name a step that no rank has begun, and
    # nothing bounds how late a rank reads it.) That several ranks bring the same does no harm: any is enough.
    counts = torch.stack([local_tokens, *(torch.full_like(local_tokens, flag) for flag in (stop, void))])
    dist.all_reduce(counts)
    tokens = counts[0]
    tokens.div_(duplicates.tokens, rounding_mode="floor")
    tokens.clamp_(min=1)  # a step of nothing but padding has loss zero, not NaN

    if pipeline is not None:
        phase("pipeline")
        share = pipeline.forward_backward(micro_batches, tokens)
    else:
        share = forward_backward(model, micro_batches, tokens, sync_every, loss_function, phase)
    phase("optimizer")

    gradients = local_gradients(model.parameters())
    host = gradients[0].device  # of offloaded gradients; else the device itself, and moving between them is nothing
    layers = square_norms(model, share.device) if layer_norms else {}
    squares = [square_norm(model.parameters(), share.device), *layers.values()]
    sums = torch.stack([share / duplicates.loss, *squares])
    dist.all_reduce(sums)
    loss, norm = sums[0], sums[1].sqrt()
    local_loss = share * tokens / local_tokens.clamp(min=1)

    stops, voids = counts[1:] > 0
    ok = guard.gate(step, norm, loss, share, stops, voids)
    loss = torch.where(voids, math.nan, loss)  # of a step that does not count nobody should see a figure
    torch._foreach_mul_(gradients, (max_norm / (norm + 1e-6)).clamp(max=1.0).to(host))
    if before_update is not None:
        before_update()
    gated_step(optimizer, ok.to(host), lr)
    optimizer.zero_grad(set_to_none=True)
    if after_update is not None:
        after_update()
    return StepResult(loss, local_loss, norm, dict(zip(layers, sums[2:].sqrt(), strict=True)) if layers else None)


@torch.no_grad()
def validate(
    model: nn.Module,
    batches: Iterable[Batch],
    device: torch.device,
    loss_function: LossFunction = cross_entropy_sum,
    duplicates: Duplicates = Duplicates(),  # noqa: B008 (immutable)
    pipeline: Pipeline | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean loss in nats per token over all ranks' `batches`, and the number of tokens (0-dim float64 tensors).

    Every rank must bring the same number of batches; tokens weigh equally wherever they are.
    duplicates, pipeline: as in `train_step`.
    """
    sums = torch.zeros(2, dtype=torch.float64, device=device)
    model.eval()
    for batch in batches:
        tokens, labels = (t.to(device, non_blocking=True) for t in batch)
        sums[0] += pipeline.loss_sum(tokens, labels) if pipeline else batch_loss(model, tokens, labels, loss_function)
        sums[1] += count_valid(labels)
    model.train()
    dist.all_reduce(sums)
    sums /= sums.new_tensor([duplicates.loss, duplicates.tokens])
    return sums[0] / sums[1], sums[1]
