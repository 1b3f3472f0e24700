"""Gradient norms of sharded parameters, without a collective, and clipping."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import nn
from torch.distributed.tensor import DTensor

#: Elements of a CPU tensor whose squares are summed in one float32: in a longer sum, small squares get lost.
_NORM_CHUNK = 2**16


def local_gradients(parameters: Iterable[nn.Parameter]) -> list[torch.Tensor]:
    """Return this rank's part of every gradient, as plain tensors."""
    gradients = (p.grad for p in parameters)
    return [g.to_local() if isinstance(g, DTensor) else g for g in gradients if g is not None]


def clip_gradients(parameters: Iterable[nn.Parameter], norm: torch.Tensor, max_norm: float) -> None:
    """Scale all gradients so that their global norm is `max_norm` at most. norm: what it is now (0-dim)."""
    gradients = local_gradients(parameters)
    # Offloaded gradients are in host memory. On one device `to` does nothing.
    torch._foreach_mul_(gradients, (max_norm / (norm + 1e-6)).clamp(max=1.0).to(gradients[0].device))


def total_norm(tensors: Iterable[torch.Tensor]) -> torch.Tensor:
    """Return the Euclidean norm of the elements of all tensors (0-dim float32); all must be on one device.

    torch sums the squares of a whole CPU tensor in one chain of float32: at 2^28 elements 2 to 4 % are missing.
    So CPU tensors are summed in chunks, without a copy. GPU kernels sum in parts anyway.
    """
    pieces: list[torch.Tensor] = []
    for tensor in tensors:
        pieces += tensor.reshape(-1).split(_NORM_CHUNK) if tensor.device.type == "cpu" else [tensor]
    if not pieces:
        return torch.zeros((), dtype=torch.float32)
    norms = torch.stack(torch._foreach_norm(pieces, 2, torch.float32))
    return torch.linalg.vector_norm(norms, dtype=torch.float64).float()


def square_norm(parameters: Iterable[nn.Parameter], device: torch.device) -> torch.Tensor:
    """Return this rank's share of the squared norm of all gradients (0-dim float32 on `device`).

    The shares of all ranks add up to it: a part that several ranks hold counts for each of them as a fraction.
    """
    by_copies: dict[int, list[nn.Parameter]] = {}
    for parameter in parameters:
        by_copies.setdefault(_copies(parameter), []).append(parameter)
    shares = [total_norm(local_gradients(group)).to(device).square() / copies for copies, group in by_copies.items()]
    return torch.stack(shares).sum() if shares else torch.zeros((), dtype=torch.float32, device=device)


def _copies(parameter: nn.Parameter) -> int:
    """Return how many ranks hold the same part of a parameter."""
    if not isinstance(parameter, DTensor):
        return 1
    sizes = zip(parameter.placements, parameter.device_mesh.shape, strict=True)
    return math.prod(size for placement, size in sizes if placement.is_replicate())


def layer_of(name: str) -> str:
    """Return the layer of a parameter or module: `layers.3` inside of a numbered one, else the top-level module."""
    parts = [part for part in name.split(".") if not part.startswith("_")]  # wrappers' names begin with one
    return ".".join(parts[: next((i for i, part in enumerate(parts) if part.isdigit()), 0) + 1])


def square_norms(model: nn.Module, device: torch.device) -> dict[str, torch.Tensor]:
    """Return `square_norm` of each layer, in model order; zero for layers on other ranks of a pipeline."""
    layers: dict[str, list[nn.Parameter]] = {}
    if (layout := getattr(model, "layout", None)) is not None:  # of a `PipelineModel`
        layers = {name: [] for name in layout.trained}
    for name, parameter in model.named_parameters():
        layers.setdefault(layer_of(name), []).append(parameter)
    return {layer: square_norm(parameters, device) for layer, parameters in layers.items()}
