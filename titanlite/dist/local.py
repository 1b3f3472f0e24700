"""What this rank holds: its part of a tensor, and its parts of a model."""

from __future__ import annotations

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


def parts_of(model: nn.Module) -> list[nn.Module]:
    """Return the modules that this rank runs: its stages of a pipeline, or the model itself."""
    stages = getattr(model, "pipeline_stages", None)
    return [model] if stages is None else list(stages())
