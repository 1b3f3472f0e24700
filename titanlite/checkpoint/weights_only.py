"""The tensors of a last save that holds weights only (`checkpoint.model_weights_only`)."""

from __future__ import annotations

from torch import nn

from titanlite.checkpoint.storage import Tensors, converted, gather
from titanlite.features.ema.names import weight_of


def weights_to_save(model: nn.Module, averages: Tensors, dtype: str) -> Tensors:
    """Return the weights as `dtype`. averages: saved in their place; empty: none."""
    tensors = gather(model)
    for name, average in averages.items():
        tensors[weight_of(name)] = average
    return {name: converted(name, tensor, dtype) for name, tensor in tensors.items()}
