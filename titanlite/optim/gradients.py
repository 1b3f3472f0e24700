"""Gradient norms of sharded parameters without a collective, and clipping."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from operator import attrgetter

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from titanlite.dist.local_parts import local

#: Elements of a CPU tensor whose squares are summed in one float32: in a longer sum, small squares
#: get lost.
_NORM_CHUNK = 2**16


def local_gradients(parameters: Iterable[nn.Parameter]) -> list[torch.Tensor]:
    """Return this rank's part of every gradient, as plain tensors."""
    gradients = (parameter.grad for parameter in parameters)
    return [local(gradient) for gradient in gradients if gradient is not None]


def clip_divisor(norm: torch.Tensor, max_norm: float) -> torch.Tensor:
    """Return the 0-dim divisor of gradients of global norm `norm` that makes it `max_norm`
    at most.
    """
    return ((norm + 1e-6) / max_norm).clamp(min=1.0)


def clip_gradients(parameters: Iterable[nn.Parameter], norm: torch.Tensor, max_norm: float) -> None:
    """Scale all gradients so that their global norm, now `norm` (0-dim), is `max_norm` at most."""
    torch._foreach_mul_(local_gradients(parameters), (max_norm / (norm + 1e-6)).clamp(max=1.0))


def total_norm(tensors: Iterable[torch.Tensor]) -> torch.Tensor:
    """Return the Euclidean norm of all tensors (0-dim float32), which must be on one device.

    CPU tensors are summed in chunks: torch sums a whole one in one chain of float32, which loses 2
    to 4 % at 2^28 elements.
    """
    pieces: list[torch.Tensor] = []
    for tensor in tensors:
        pieces += tensor.reshape(-1).split(_NORM_CHUNK) if tensor.device.type == "cpu" else [tensor]
    if not pieces:
        return torch.zeros((), dtype=torch.float32)
    norms = torch.stack(torch._foreach_norm(pieces, 2, torch.float32))
    return torch.linalg.vector_norm(norms, dtype=torch.float64).float()


@torch.no_grad()
def square_sum(
    parameters: Iterable[nn.Parameter],
    device: torch.device,
    of: Callable[[nn.Parameter], torch.Tensor | None] = attrgetter("grad"),
) -> torch.Tensor:
    """Return this rank's share of the sum of squares of all gradients: 0-dim float32 on `device`.

    The shares of all ranks add up. A part that several ranks hold counts as a fraction on each.

    of: parameter -> the tensor to count, divided as the parameter. Weights: `local_parts.plain`.
    """
    by_copies: dict[int, list[torch.Tensor]] = {}
    for parameter in parameters:
        copies = 1
        if isinstance(parameter, DTensor):
            sizes = zip(parameter.placements, parameter.device_mesh.shape, strict=True)
            copies = math.prod(size for placement, size in sizes if placement.is_replicate())
        pieces = by_copies.setdefault(copies, [])
        tensor = of(parameter)
        if tensor is not None:
            pieces.append(local(tensor))
    shares = [total_norm(some).square() / copies for copies, some in by_copies.items() if some]
    if not shares:
        return torch.zeros((), dtype=torch.float32, device=device)
    total = torch.stack(shares).sum()
    if total.device.type != device.type:
        # That of offloaded gradients is in host memory. A fill does not wait for the GPU; a copy
        # would.
        total = torch.full_like(total, total.item(), device=device)
    return total


def layer_of(name: str) -> str:
    """Return the layer of a parameter or module: `layers.3`, or the top-level module outside of
    numbered ones.
    """
    # Names of wrappers begin with "_".
    parts = [part for part in name.split(".") if not part.startswith("_")]
    for index, part in enumerate(parts):
        if part.isdigit():
            return ".".join(parts[: index + 1])
    return ".".join(parts[:1])


def square_sums(model: nn.Module, device: torch.device) -> dict[str, torch.Tensor]:
    """Return `square_sum` of each layer, in model order; zero for layers on other ranks of a
    pipeline.
    """
    layers: dict[str, list[nn.Parameter]] = {}
    # A `PipelineModel` has one.
    layout = getattr(model, "layout", None)
    if layout is not None:
        layers = {layer_of(name): [] for name in layout.trained}
    for name, parameter in model.named_parameters():
        layers.setdefault(layer_of(name), []).append(parameter)
    return {layer: square_sum(parameters, device) for layer, parameters in layers.items()}
