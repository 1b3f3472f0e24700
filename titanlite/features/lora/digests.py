"""Hashes of frozen weights that depend neither on their file nor on how ranks share them.

A number counts as its 16 bits in bfloat16, times a factor of its place, modulo 2 ** 64. So parts
add up to the whole, weights of any container have one hash, and it is the same in float32. It finds
other weights, not an enemy.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

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
        if tensor is None or not _counts_here(tensor):
            continue
        total = _sum(*_part(tensor))
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


def _counts_here(tensor: Tensor) -> bool:
    """Return whether this rank is the first of those that hold the same part."""
    if not isinstance(tensor, DTensor):
        return dist.get_rank() == 0
    mesh = tensor.device_mesh
    place = mesh.get_coordinate()
    assert place is not None
    copies = zip(place, tensor.placements, strict=True)
    return not any(index for index, placement in copies if placement.is_replicate())


def _part(tensor: Tensor) -> tuple[Tensor, tuple[int, ...], tuple[int, ...]]:
    shape = tuple(tensor.shape)
    if not isinstance(tensor, DTensor):
        return tensor, (0,) * len(shape), shape
    _, offset = compute_local_shape_and_global_offset(shape, tensor.device_mesh, tensor.placements)
    return tensor.to_local(), tuple(offset), shape


@torch.no_grad()
def _sum(part: Tensor, offset: tuple[int, ...], shape: tuple[int, ...]) -> int:
    """shape: of the whole, a stack of matrices or less."""
    if part.numel() == 0:
        return 0
    if part.ndim < 2:
        part = part.reshape(-1, 1)
        offset = (*offset, 0)[-2:] if offset else (0, 0)
        shape = (*(shape or (1,)), 1)
    total = 0
    for matrix, first in _matrices(part, offset, shape):
        rows = max(_AT_ONCE // matrix.shape[1], 1)
        for start in range(0, matrix.shape[0], rows):
            piece = matrix[start : start + rows]
            total += _sum_of_rows(piece, first + start, offset[-1])
    return total % (1 << 64)


def _matrices(
    part: Tensor, offset: tuple[int, ...], shape: tuple[int, ...]
) -> Iterator[tuple[Tensor, int]]:
    """Yield the matrices of a part with their first row in the whole."""
    if part.ndim == 2:
        yield part, offset[0]
        return
    each = 1
    for size in shape[1:-1]:
        each *= size
    for index, inner in enumerate(part, offset[0]):
        for matrix, first in _matrices(inner, offset[1:], shape[1:]):
            yield matrix, index * each + first


def _sum_of_rows(piece: Tensor, first: int, column: int) -> int:
    bits = piece.detach().to(torch.bfloat16).contiguous().view(torch.int16)
    words = bits.to(torch.int64).bitwise_and_(0xFFFF)
    places = torch.arange(column, column + bits.shape[1], device=bits.device)
    # Four neighbours have one factor, as the 16 bits each of one number of 64.
    factors = _mixed(places // _WORD, _COLUMN) << (places % _WORD * 16)
    sums = (words * factors).sum(1)
    rows = torch.arange(first, first + len(sums), device=bits.device)
    return int((sums * _mixed(rows, _ROW)).sum())


def _mixed(places: Tensor, factor: int) -> Tensor:
    mixed = (places + 1) * factor
    mixed = (mixed ^ (mixed >> 29)) * _MIX
    return mixed ^ (mixed >> 32) | 1
