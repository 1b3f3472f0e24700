"""This rank's part of a tensor, and its parts of a model."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor


def local(tensor: Tensor) -> Tensor:
    """Return this rank's part of a tensor; in-place changes of it change the tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def plain_local(tensor: Tensor) -> Tensor:
    """Return this rank's part of a tensor, outside of autograd.

    No operator of DTensor runs: a thread that ran one releases references without Python's lock.
    """
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def wrapper_of(tensor: Tensor) -> Any:
    """Return torchao's wrapper of a weight that is gathered in float8, if any."""
    part = plain_local(tensor)
    module = sys.modules.get("torchao.float8.fsdp_utils")
    if module is None or not isinstance(part, module.WeightWithDynamicFloat8CastTensor):
        return None
    return part


def plain(tensor: Tensor) -> Tensor:
    """Return a weight without torchao's wrapper, on the same memory; others stay."""
    wrapper = wrapper_of(tensor)
    if wrapper is None:
        return tensor
    inner: Tensor = wrapper._tensor.detach()
    if not isinstance(tensor, DTensor):
        return inner
    # Keep the placements: `from_local` does not take those of tensor parallelism under FSDP.
    return DTensor(inner, tensor._spec, requires_grad=False)


def parts_of(model: nn.Module) -> list[nn.Module]:
    """Return this rank's stages of a pipeline, or the model itself."""
    stages = getattr(model, "pipeline_stages", None)
    return [model] if stages is None else list(stages())


def bit_sum(part: Tensor) -> Tensor:
    """Sum a tensor's bytes, as far as possible as numbers of 64 bits; on its device, a scalar."""
    flat = part.detach().reshape(-1)
    if flat.storage_offset() * flat.element_size() % 8:
        flat = flat.clone()
    octets = flat.view(torch.uint8)
    whole = octets.numel() // 8 * 8
    return octets[:whole].view(torch.int64).sum() + octets[whole:].sum()
