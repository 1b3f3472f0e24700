"""Rotary frequencies of the scalings other than Llama 3.1's, in fp32.

The order of operations is that of `transformers`, since published weights were trained with these
roundings.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from titanlite.models.rope_scaling import (
    DynamicScaling,
    LinearScaling,
    LongRopeScaling,
    ProportionalScaling,
    Scaling,
    YarnScaling,
)


def scaled_frequencies(head_dim: int, theta: float, scaling: Scaling, length: int) -> Tensor:
    """Return the radians per position of each rotated pair: [head_dim / 2] fp32.

    length: tokens of the sequence.
    """
    formula = _FORMULAS[type(scaling)]
    return formula(head_dim, theta, scaling, length)


def _periods(head_dim: int, theta: float | Tensor) -> Tensor:
    """Return theta ** (2 i / head_dim), the positions per radian of pair i: [head_dim / 2]."""
    periods: Tensor = theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    return periods


def _linear(head_dim: int, theta: float, scaling: LinearScaling, length: int) -> Tensor:
    return 1.0 / _periods(head_dim, theta) / scaling.factor


def _proportional(head_dim: int, theta: float, scaling: ProportionalScaling, length: int) -> Tensor:
    plain = 1.0 / _periods(head_dim, theta)
    rotated = int(scaling.partial_rotary_factor * head_dim // 2)
    plain[rotated:] = 0.0
    return plain / scaling.factor


def _dynamic(head_dim: int, theta: float, scaling: DynamicScaling, length: int) -> Tensor:
    original = scaling.original_max_position_embeddings
    if length <= original:
        return 1.0 / _periods(head_dim, theta)
    # In fp32, as `transformers` has the length in a tensor.
    stretch = scaling.factor * torch.tensor(length) / original - (scaling.factor - 1)
    return 1.0 / _periods(head_dim, theta * stretch ** (head_dim / (head_dim - 2)))


def _yarn(head_dim: int, theta: float, scaling: YarnScaling, length: int) -> Tensor:
    periods = _periods(head_dim, theta)
    # The pairs that turn `beta_fast` and `beta_slow` times in the original context.
    first = _pair_of(scaling.beta_fast, head_dim, theta, scaling)
    last = _pair_of(scaling.beta_slow, head_dim, theta, scaling)
    if scaling.truncate:
        first = math.floor(first)
        last = math.ceil(last)
    first = max(first, 0)
    last = min(last, head_dim - 1)
    if first == last:
        last += 0.001
    pairs = torch.arange(head_dim // 2, dtype=torch.float32)
    keep = 1 - ((pairs - first) / (last - first)).clamp(0, 1)
    return 1.0 / (scaling.factor * periods) * (1 - keep) + 1.0 / periods * keep


def _pair_of(turns: float, head_dim: int, theta: float, scaling: YarnScaling) -> float:
    """Return the pair, not rounded, that turns so often in the original context (appendix A.2)."""
    period = scaling.original_max_position_embeddings / (turns * 2 * math.pi)
    return head_dim * math.log(period) / (2 * math.log(theta))


def _longrope(head_dim: int, theta: float, scaling: LongRopeScaling, length: int) -> Tensor:
    is_long = length > scaling.original_max_position_embeddings
    factors = scaling.long_factor if is_long else scaling.short_factor
    return 1.0 / (torch.tensor(factors, dtype=torch.float32) * _periods(head_dim, theta))


_FORMULAS: dict[type[Scaling], Callable[[int, float, Any, int], Tensor]] = {
    LinearScaling: _linear,
    ProportionalScaling: _proportional,
    DynamicScaling: _dynamic,
    YarnScaling: _yarn,
    LongRopeScaling: _longrope,
}
