"""Traces a block's forward, without data, for the tensors that its backward needs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from titanlite.config.sections import ActivationCheckpoint
from titanlite.parallel.activation_checkpoint import checkpoint_block, recomputed_blocks


@dataclass(frozen=True)
class ActivationStats:
    """Blocks of a model, those that recompute, and the bytes that one of them and one of the others
    keep, per rank and micro-batch.
    """

    blocks: int
    recomputing: int
    block_bytes: int
    plain_bytes: int

    @property
    def total_bytes(self) -> int:
        """Bytes that all blocks keep."""
        plain = self.blocks - self.recomputing
        return self.recomputing * self.block_bytes + plain * self.plain_bytes


def trace_block(
    model: nn.Module,
    names: Sequence[str],
    settings: ActivationCheckpoint,
    tokens: tuple[int, int],
    device: torch.device,
    dtype: torch.dtype,
) -> ActivationStats:
    """Run one block on tensors without data, and measure it.

    model: on the meta device, without checkpointing; do not use it afterwards. tokens: (batch, seq)
    of a micro-batch. device, dtype: of the real run, since both decide which attention kernel runs.
    """
    recomputing = len(recomputed_blocks(names, settings))
    model.to(dtype)
    with FakeTensorMode(allow_non_fake_inputs=True):
        # Like `to_empty`, which would load a part of the compiler for meta tensors.
        model._apply(lambda tensor: torch.empty(tensor.shape, dtype=tensor.dtype, device=device))
        block = model.get_submodule(names[0])
        ids = torch.zeros(tokens, dtype=torch.int64, device=device)
        args, kwargs = arguments_of(block, model, ids)
        plain = traced = kept_bytes(block, args, kwargs)
        if recomputing:
            checkpoint_block(block, settings.by_op)
            traced = kept_bytes(block, args, kwargs)
    return ActivationStats(len(names), recomputing, traced, plain)


class _Made(TorchDispatchMode):
    """Keeps the storages that operators make, and their bytes."""

    supports_higher_order_operators = True  # flex_attention is one

    def __init__(self) -> None:
        super().__init__()
        self.bytes: dict[StorageWeakRef, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                self.bytes.setdefault(StorageWeakRef(storage), storage.nbytes())
        return out


def kept_bytes(block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """Return the bytes of what lives after a forward."""
    with _Made() as made:
        output = block(*args, **kwargs)
    output = output[0] if isinstance(output, tuple) else output
    # This block keeps its input, though another block made it; the next block keeps the output.
    for tensor in (output, *block.parameters()):
        made.bytes.pop(StorageWeakRef(tensor.untyped_storage()), None)
    hidden = args[0].untyped_storage()
    made.bytes[StorageWeakRef(hidden)] = hidden.nbytes()
    return sum(size for ref, size in made.bytes.items() if not ref.expired())


class _Found(Exception):
    pass


def arguments_of(
    block: nn.Module, model: nn.Module, tokens: Tensor
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments with which the model calls that block."""

    def catch(_: nn.Module, args: Any, kwargs: Any) -> None:
        raise _Found(args, kwargs)

    with (
        block.register_forward_pre_hook(catch, with_kwargs=True),
        pytest.raises(_Found) as caught,
    ):
        model(tokens)
    args, kwargs = caught.value.args
    return tuple(_leaf(value) for value in args), kwargs


def _leaf(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    return value.detach().requires_grad_(value.requires_grad)
