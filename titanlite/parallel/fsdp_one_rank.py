"""Weights and gradients that no other rank has a part of: `fully_shard` without its copies, and
with the same numbers.

They are those of a run on one rank, and experts that all ranks share by expert parallelism.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from titanlite.parallel.fsdp_private import (
    FSDPParam,
    ReduceScatter,
    parameter_groups,
    streams_of,
)


def avoid_copies(model: nn.Module) -> None:
    """Let a rank that has weights alone compute with the sharded ones, and not copy gradients; in
    place.

    torch copies the weights once, gradients two or three times. Call it after `fully_shard`.
    """
    groups = list(parameter_groups(model))
    alone = [group for group in groups if group.mesh_info.mesh.size() == 1]
    for group in alone:
        group._reduce_scatter_comm = _OneBuffer()
        # A sum over one rank. A division by 1.0 would copy every gradient once more.
        group.gradient_divide_factor = None
        for parameter in group.fsdp_params:
            # torch's usual copy gathers neither a parameter in host memory (`CPUOffloadPolicy`) nor
            # one that defines an all-gather (float8).
            has_own_gather = hasattr(parameter._sharded_local_tensor, "fsdp_pre_all_gather")
            if not (has_own_gather or parameter.offload_to_cpu):
                parameter.__class__ = _WholeParam
    if len(alone) == len(groups):
        _reduce_where_it_computes(model)


def casts_together(device: torch.device) -> bool:
    """Return whether gradients of a group are cast together, as on a GPU by one kernel."""
    return device.type != "cpu"


class _WholeParam(FSDPParam):
    """A parameter whose gathered form is its sharded one, or a cast of it."""

    @property
    def all_gather_inputs(self) -> list[torch.Tensor]:
        # Not cast: the copy into `all_gather_outputs` casts.
        return [self._sharded_param_data]

    def init_all_gather_outputs(
        self,
        all_gather_input_numels: list[int],
        all_gather_input_dtypes: list[torch.dtype],
        world_size: int,
        device: torch.device,
        **more: Any,
    ) -> None:
        data = self._sharded_param_data
        # torch sets the size of the output's storage, which must not be one of several tensors.
        if self.param_dtype is None and data.untyped_storage().nbytes() == data.nbytes:
            # A copy of a tensor to itself does nothing.
            self.all_gather_outputs = [data]
            return
        dtypes = [self.param_dtype or self.orig_dtype]
        # torch 2.11 has one more argument.
        super().init_all_gather_outputs(all_gather_input_numels, dtypes, world_size, device, **more)

    def free_unsharded_param(self) -> None:
        if self.all_gather_outputs[0] is not self._sharded_param_data:
            super().free_unsharded_param()

    def reset_sharded_param(self) -> None:
        super().reset_sharded_param()
        if self.all_gather_outputs and self.all_gather_outputs[0] is not self._sharded_param_data:
            # The next gather makes it of the new weights.
            self.all_gather_outputs = []
            del self._unsharded_param

    def accumulate_unsharded_grad_if_needed(self) -> None:
        """Add to the sharded gradient, so that torch finds nothing to reduce."""
        whole = getattr(self, "_unsharded_param", None)
        if whole is None or whole.grad is None:
            return
        # torch's way sums micro-batches in `reduce_dtype`.
        casts = casts_together(self.device) and whole.grad.dtype != self.orig_dtype
        if casts or (self.reduce_dtype or whole.grad.dtype) != self.orig_dtype:
            return super().accumulate_unsharded_grad_if_needed()
        gradient = self.unsharded_grad_data.to(self.orig_dtype)
        whole.grad = None
        sharded = self.sharded_param
        if sharded.grad is None:
            sharded.grad = self.to_sharded_dtensor(gradient)
        else:
            assert isinstance(sharded.grad, DTensor)
            sharded.grad._local_tensor += gradient
        for hook in (getattr(sharded, "_post_accumulate_grad_hooks", None) or {}).values():
            hook(sharded)


class _OneBuffer(ReduceScatter):
    """One tensor as input and output of `fully_shard`'s reduction: nothing is copied."""

    _given: torch.Tensor | None = None

    def allocate(
        self, size: Sequence[Any], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        # torch asks for the input, then for the output.
        if self._given is None:
            self._given = torch.empty(*size, dtype=dtype, device=device)
            return self._given
        given = self._given
        self._given = None
        return given

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        raise AssertionError("one rank reduces nothing")


def _reduce_where_it_computes(model: nn.Module) -> None:
    """Let a rank that has all weights alone reduce its gradients in the stream that computes.

    A stream's freed memory serves that stream only. In FSDP's own, that of all gradients would lie
    idle during the forward pass: 30 GiB of an 8B model.
    """
    streams = streams_of(model)
    make_streams = streams.lazy_init

    def lazy_init(device: torch.device) -> None:
        make_streams(device)
        streams.reduce_scatter_stream = getattr(torch, device.type).current_stream()

    streams.lazy_init = lazy_init
