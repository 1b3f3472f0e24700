"""Muon on sharded weights: momentum whose matrices are made orthogonal before the update.

Jordan et al., 2024, https://kellerjordan.github.io/posts/muon. The step size 0.2 * sqrt(max(rows,
columns)) gives updates as large as AdamW's. So both take one learning rate and weight decay (Liu et
al., 2025, arXiv:2502.16982). `torch.optim.Muon` computes the same on whole matrices; on a shard of
a matrix it would compute something else.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from titanlite.dist.local_parts import local
from titanlite.optim.adamw import AnyPrecisionAdamW

#: Coefficients of the quintic Newton-Schulz iteration, and its steps (Jordan et al.).
_COEFFICIENTS = (3.4445, -4.775, 2.0315)
_STEPS = 5


def orthogonalize(matrices: torch.Tensor) -> torch.Tensor:
    """Return matrices [..., m, n] with all singular values moved to about 1 (0.7 to 1.2), in
    bfloat16.
    """
    a, b, c = _COEFFICIENTS
    x = matrices.bfloat16().flatten(0, -3)
    wide = x.shape[-2] <= x.shape[-1]
    x = x if wide else x.mT
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=1e-7)
    for _ in range(_STEPS):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return (x if wide else x.mT).reshape(matrices.shape)


class Muon(AnyPrecisionAdamW):
    """Muon for groups with `muon = True`, AdamW in float32 for the others.

    Parameters of such groups are matrices [m, n] or [k, m, n]. One rank of those that share a
    matrix makes it orthogonal, between two all-to-alls of its rows.
    """

    def __init__(self, parameters: Any, *, momentum: float = 0.95, **options: Any) -> None:
        super().__init__(parameters, variance_dtype=torch.float32, **options)
        self.momentum = momentum

    def update(self, group: dict[str, Any], parameters: list[torch.nn.Parameter]) -> None:
        if not group.get("muon"):
            return super().update(group, parameters)
        alike = defaultdict(list)
        for parameter in parameters:
            sharding = (
                (parameter.device_mesh, parameter.placements)
                if isinstance(parameter, DTensor)
                else None
            )
            alike[parameter.shape, parameter.device, sharding].append(parameter)
        for members in alike.values():
            # So many that no rank holds more than one whole; a strided one all ranks hold whole.
            at_once = 1
            if isinstance(members[0], DTensor):
                mesh = members[0].device_mesh
                at_once = mesh.size(-1) if _is_strided(members[0].placements) else mesh.size()
            scale = 0.2 * math.sqrt(max(members[0].shape[-2:]))
            for first in range(0, len(members), at_once):
                some = members[first : first + at_once]
                whole = _orthogonal([self._direction(one) for one in some], some[0])
                for parameter, direction in zip(some, whole, strict=True):
                    weight = local(parameter)
                    decayed = weight * (1 - group["lr"] * group["weight_decay"])
                    self.store(weight, decayed.add_(direction, alpha=-group["lr"] * scale))

    def _direction(self, parameter: torch.nn.Parameter) -> torch.Tensor:
        gradient = self.gradient_of(parameter)
        buffer = self.buffer(parameter, "momentum", torch.float32)
        average = buffer.lerp(gradient, 1 - self.momentum)
        self.store(buffer, average)
        return gradient.lerp(average, self.momentum)  # Nesterov's


def _is_strided(placements: Sequence[Placement]) -> bool:
    """Whether TP and FSDP divide the same dimension: torch can only gather such tensors."""
    return any(isinstance(placement, _StridedShard) for placement in placements)


def _orthogonal(directions: list[torch.Tensor], like: torch.nn.Parameter) -> list[torch.Tensor]:
    stack = torch.stack(directions).bfloat16()
    if not isinstance(like, DTensor):
        return list(orthogonalize(stack).unbind())
    mesh = like.device_mesh
    shape = torch.Size((len(directions), *like.shape))
    stride = torch.empty(shape, device="meta").stride()

    def part(tensor: torch.Tensor, placements: Sequence[Placement]) -> DTensor:
        return DTensor.from_local(
            tensor, mesh, placements, run_check=False, shape=shape, stride=stride
        )

    sharded: list[Placement] = []
    for placement in like.placements:
        if isinstance(placement, _StridedShard):
            factor = placement.split_factor
            sharded.append(_StridedShard(placement.dim + 1, split_factor=factor))
        elif isinstance(placement, Shard):
            sharded.append(Shard(placement.dim + 1))
        else:
            sharded.append(placement)
    by_matrix: list[Placement] = [Shard(0)] * mesh.ndim
    whole = part(stack, sharded)
    if _is_strided(sharded):
        whole = whole.redistribute(placements=[Replicate()] * mesh.ndim)
        # There are fewer matrices than ranks. Where a flattened mesh of both dimensions is known,
        # torch gathers by it, and takes such uneven parts for those of one division.
        by_matrix[:-1] = [Replicate()] * (mesh.ndim - 1)
    done = part(orthogonalize(whole.redistribute(placements=by_matrix).to_local()), by_matrix)
    if _is_strided(sharded):
        done = done.redistribute(placements=[Replicate()] * mesh.ndim)
    # The parameters may be in host memory; the mesh's tensors are on its devices.
    return list(done.redistribute(placements=sharded).to_local().to(stack.device).unbind())
