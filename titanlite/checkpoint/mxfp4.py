"""Weights in MXFP4, as GPT-OSS is published: 4 bits for each number, and a power of two for each
32 of them (OCP Microscaling Formats 1.0).

A tensor `NAME_blocks` [experts, out, in / 32, 16] has two numbers in each byte, the first in the
low bits. `NAME_scales` [experts, out, in / 32] has the exponents. Together they are the tensor
NAME [experts, in, out]. bfloat16 holds every value exactly.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from titanlite.checkpoint.foreign_weights import Slices

_PER_SCALE = 32
_BYTES = _PER_SCALE // 2
_POSITIVE = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def unpacked(blocks: Any, scales: Any) -> tuple[tuple[int, ...], Callable[[Slices], Tensor]]:
    """Return a tensor's shape, and what reads a slice in bfloat16. Raises ValueError for other
    shapes.

    blocks, scales: slices of safetensors.
    """
    shape = tuple(blocks.get_shape())
    of_scales = tuple(scales.get_shape())
    if len(shape) != 4 or shape[3] != _BYTES or of_scales != shape[:3]:
        raise ValueError(
            f"has the shape {list(shape)}, and its scales {list(of_scales)}; expected "
            f"[experts, out, in / {_PER_SCALE}, {_BYTES}], and the same without the last"
        )
    experts, out, groups, _ = shape

    def read(slices: Slices) -> Tensor:
        expert, rows, columns = slices
        begin, end, _ = rows.indices(groups * _PER_SCALE)
        taken = slice(begin // _PER_SCALE, -(-end // _PER_SCALE))
        place = expert, columns, taken
        values = _values(blocks[place], scales[place])
        first = taken.start * _PER_SCALE
        return values[:, :, begin - first : end - first].transpose(1, 2)

    return (experts, groups * _PER_SCALE, out), read


def _values(blocks: Tensor, scales: Tensor) -> Tensor:
    """Return [experts, out, in] bfloat16 of uint8 [experts, out, groups, 16] and [experts, out,
    groups].
    """
    numbers = torch.tensor([*_POSITIVE, *(-number for number in _POSITIVE)], dtype=torch.bfloat16)
    byte = torch.arange(256)
    pairs = torch.stack((numbers[byte % 16], numbers[byte // 16]), 1)
    result = torch.empty(*blocks.shape[:3], _PER_SCALE, dtype=torch.bfloat16)
    # One expert at a time: places in a table take more than the values.
    for place, expert in enumerate(blocks):
        values = F.embedding(expert.int(), pairs).flatten(2)
        result[place] = values * _powers(scales[place]).unsqueeze(2)
    return result.flatten(2)


def _powers(exponents: Tensor) -> Tensor:
    """Return 2 ** (exponents - 127) in float32, from its bits."""
    bits = exponents.int() << 23
    smallest = 1 << 22
    return torch.where(exponents == 0, smallest, bits).view(torch.float32)
