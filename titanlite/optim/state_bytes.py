"""Bytes of an optimizer's state, for the start report."""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import nn

from titanlite.config.model_sections import Optimizer
from titanlite.optim.groups import parameter_groups
from titanlite.utils import is_dotted


def state_bytes(
    parameters: dict[str, nn.Parameter],
    settings: Optimizer,
    dtype: torch.dtype,
    blocks: Collection[str] = (),
) -> float | None:
    """Return bytes of state per parameter of the optimizer of `build_optimizer`; None for a dotted
    path.

    dtype: of the weights; `parameters` may have another one.
    """
    if is_dotted(settings.name):
        return None
    groups = parameter_groups(parameters, settings, blocks)
    state = 0.0
    for group in groups:
        for parameter in group["params"]:
            each = _bytes_each(parameter, settings, dtype, is_muon="muon" in group)
            state += parameter.numel() * each
    return state / sum(parameter.numel() for parameter in parameters.values())


def _bytes_each(
    parameter: nn.Parameter, settings: Optimizer, dtype: torch.dtype, is_muon: bool
) -> float:
    """Return bytes of state for each number of a parameter."""
    if settings.name == "Muon":
        return 4 if is_muon else 8
    if settings.name not in ("AnyPrecisionAdamW", "AdamW8bit"):
        return 2 * dtype.itemsize
    from titanlite.optim.adamw import STATE_DTYPES, block_of

    momentum, variance, compensation = (
        getattr(torch, getattr(settings, name)).itemsize for name in STATE_DTYPES
    )
    if not settings.kahan:
        compensation = 0
    if settings.name == "AnyPrecisionAdamW":
        return float(momentum + variance + compensation)
    block = block_of(parameter.shape)
    moments = 2 + 8 / block if block else 8
    return float(moments + compensation)
