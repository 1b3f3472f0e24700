"""Attention without cuDNN's library, which torch loads at the end of its import in every process on
the null GPU.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

_libraries: list[Any] = []  # the end of one would take its kernels away


def load() -> None:
    """Let cuDNN's attention give results of the right shape and layout, with nothing computed."""
    import ctypes

    import torch
    from torch.utils._pytree import tree_map

    def hollow(op: Any) -> Callable[..., Any]:
        def empty(tensor: Any, device: Any) -> Any:
            if not isinstance(tensor, torch.Tensor):
                return tensor
            return torch.empty_strided(
                tensor.size(), tensor.stride(), dtype=tensor.dtype, device=device
            )

        def call(*args: Any, **kwargs: Any) -> Any:
            device = next(arg.device for arg in args if isinstance(arg, torch.Tensor))
            shapes, named = tree_map(lambda t: empty(t, "meta"), (args, kwargs))
            ctypes.CDLL(None).nullgpu_kernel(op._schema.name.encode(), None)
            return tree_map(lambda t: empty(t, device), op(*shapes, **named))

        return call

    library = torch.library.Library("aten", "IMPL")
    for name in (
        "_scaled_dot_product_cudnn_attention",
        "_scaled_dot_product_cudnn_attention_backward",
    ):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            library.impl(name, hollow(getattr(torch.ops.aten, name).default), "CUDA")
    _libraries.append(library)
