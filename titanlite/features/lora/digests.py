"""Hashes of frozen weights that depend neither on their file nor on how ranks share them.

A number counts as its 16 bits in bfloat16, times a factor of its place, modulo 2 ** 64. So parts
add up to the whole, weights of any container have one hash, and it is the same in float32. It finds
other weights, not an enemy.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from titanlite.parallel.init import part_of

#: Numbers that are hashed at a time: they take 16 bytes each.
_AT_ONCE = 1 << 22
#: Odd factors of splitmix64, as signed integers.
_ROW = 0x9E3779B97F4A7C15 - (1 << 64)
_MIX = 0xBF58476D1CE4E5B9 - (1 << 64)
_COLUMN = 0x94D049BB133111EB - (1 << 64)
_WORD = 4
_MASK = (1 << 32) - 1


def digest_of_tensor(tensor: Tensor) -> str:
    """Return the hash of a whole tensor, 16 hexadecimal digits."""
    return _text(_sum(tensor, (0,) * tensor.ndim, tuple(tensor.shape)))


def digests_of(tensors: Mapping[str, Tensor], names: list[str]) -> dict[str, str]:
    """Return name → hash of tensors that all ranks share. All ranks call it together.

    names: of all ranks, in one order.
    """
    device = next(iter(tensors.values())).device
    if dist.get_backend() == "gloo":
        device = torch.device("cpu")
    # In halves, whose sums over ranks stay below 2 ** 63.
    halves = torch.zeros(len(names), 2, dtype=torch.int64)
    for index, name in enumerate(names):
        tensor = tensors.get(name)
        if tensor is None:
            continue
        # The first of the ranks that hold the same part counts it.
        copies = [dist.get_rank()]
        if isinstance(tensor, DTensor):
            place: Any = tensor.device_mesh.get_coordinate()
            ways = zip(place, tensor.placements, strict=True)
            copies = [number for number, placement in ways if placement.is_replicate()]
        if not any(copies):
            part, offset = part_of(tensor)
            total = _sum(part, offset, tuple(tensor.shape))
            halves[index, 0] = total & _MASK
            halves[index, 1] = total >> 32
    halves = halves.to(device)
    dist.all_reduce(halves)
    found = {}
    for name, (low, high) in zip(names, halves.tolist(), strict=True):
        found[name] = _text((low + (high << 32)) % (1 << 64))
    return found


def together(digests: Mapping[str, str]) -> str:
    """Return one hash of those of all tensors."""
    text = json.dumps(sorted(digests.items()))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _text(total: int) -> str:
    return f"{total:016x}"


@torch.no_grad()
def _sum(part: Tensor, offset: tuple[int, ...], shape: tuple[int, ...]) -> int:
    """offset: where the part begins in the whole. shape: of the whole."""
    if part.numel() == 0:
        return 0
    if part.ndim < 2:
        part = part.reshape(-1, 1)
        offset = (*(offset or (0,)), 0)
        shape = (*(shape or (1,)), 1)
    # Number of each row in the whole, over all dimensions but the last.
    numbers = torch.zeros((), dtype=torch.int64, device=part.device)
    for size, first, whole in zip(part.shape[:-1], offset, shape, strict=False):
        here = torch.arange(first, first + size, device=part.device)
        numbers = numbers.unsqueeze(-1) * whole + here
    columns = part.shape[-1]
    places = torch.arange(offset[-1], offset[-1] + columns, device=part.device)
    # Four neighbours have one factor, as the 16 bits each of one number of 64.
    factors = _mixed(places // _WORD, _COLUMN) << (places % _WORD * 16)
    at_once = max(_AT_ONCE // columns, 1)
    rows = part.detach().flatten(0, -2).split(at_once)
    total = 0
    for piece, row in zip(rows, numbers.flatten().split(at_once), strict=True):
        bits = piece.to(torch.bfloat16).contiguous().view(torch.int16)
        words = bits.to(torch.int64).bitwise_and_(0xFFFF)
        total += int(((words * factors).sum(1) * _mixed(row, _ROW)).sum())
    return total % (1 << 64)


def _mixed(places: Tensor, factor: int) -> Tensor:
    mixed = (places + 1) * factor
    mixed = (mixed ^ (mixed >> 29)) * _MIX
    return mixed ^ (mixed >> 32) | 1
