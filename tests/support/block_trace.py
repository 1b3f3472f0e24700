"""A block's forward and backward on tensors without data: what it keeps, which operators run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves

from titanlite.config.sections import ActivationCheckpoint
from titanlite.parallel.activation_checkpoint import (
    ATTENTION,
    checkpoint_block,
    kind_of,
    recomputed_blocks,
)


@dataclass(frozen=True)
class ActivationStats:
    """What a block keeps for its backward, by a trace of one block; bytes are per rank and
    micro-batch.
    """

    #: Blocks of the model, and those that recompute.
    blocks: int
    recomputing: int
    #: In one recomputing block by kind ("matmul", "attention"): operators of the forward, those
    #: that the policy saves, and those that run again in the backward.
    forward: dict[str, int]
    saved: dict[str, int]
    recomputed: dict[str, int]
    #: A recomputing block, and one that keeps everything.
    block_bytes: int
    plain_bytes: int
    #: Names of the attention operators of a forward: the kernels of this device.
    kernels: tuple[str, ...] = ()

    @property
    def total_bytes(self) -> int:
        """Bytes that all blocks keep."""
        return (
            self.recomputing * self.block_bytes
            + (self.blocks - self.recomputing) * self.plain_bytes
        )


def trace_block(
    model: nn.Module,
    names: Sequence[str],
    settings: ActivationCheckpoint,
    tokens: tuple[int, int],
    device: torch.device,
    dtype: torch.dtype,
    masked_len: int | None = None,
) -> ActivationStats:
    """Run one block forward, and backward if blocks recompute, on tensors without data, and measure
    it.

    model: on the meta device, without checkpointing; do not use it afterwards. tokens: (batch, seq)
    of a micro-batch. device, dtype: of the real run, since both decide which attention kernel runs.
    masked_len: tokens of a whole sequence whose documents are masked; None: no masks.
    """
    chosen = recomputed_blocks(names, settings)
    model.to(dtype)
    with FakeTensorMode(allow_non_fake_inputs=True):
        # Like `to_empty`, which would load a part of the compiler for meta tensors.
        model._apply(lambda tensor: torch.empty(tensor.shape, dtype=tensor.dtype, device=device))
        block = model.get_submodule(names[0])
        one = (
            {}
            if masked_len is None
            else {"doc_ids": torch.zeros(tokens[0], masked_len, dtype=torch.int32, device=device)}
        )
        args, kwargs = arguments_of(
            block, model, torch.zeros(tokens, dtype=torch.int64, device=device), **one
        )
        plain = traced = _Recorder().run(block, args, kwargs, backward=bool(chosen))
        if chosen:
            checkpoint_block(block, settings.by_op)
            traced = _Recorder().run(block, args, kwargs)
    matmuls, attention = plain.forward["matmul"], plain.forward["attention"]
    return ActivationStats(
        blocks=len(names),
        recomputing=len(chosen),
        forward={"matmul": matmuls, "attention": attention},
        saved={"matmul": (matmuls + 1) // 2, "attention": attention} if settings.by_op else {},
        recomputed={
            kind: traced.backward[kind] - plain.backward[kind] for kind in ("matmul", "attention")
        },
        block_bytes=traced.kept_bytes,
        plain_bytes=plain.kept_bytes,
        kernels=tuple(sorted(name for name in plain.names if name in ATTENTION)),
    )


class _Recorder(TorchDispatchMode):
    """Counts operators by kind in a block's forward and backward, and measures the tensors that
    live in between.
    """

    supports_higher_order_operators = True  # flex_attention is one

    def __init__(self) -> None:
        super().__init__()
        self.forward: Counter[str] = Counter()
        self.backward: Counter[str] = Counter()
        self.names: set[str] = set()
        self.kept_bytes = 0
        self._phase = self.forward
        self._made: dict[StorageWeakRef, int] = {}

    def run(
        self, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], backward: bool = True
    ) -> _Recorder:
        with self:
            output = block(*args, **kwargs)
        output = output[0] if isinstance(output, tuple) else output
        # This block keeps its input, though another block made it; the next block keeps the output.
        others = {StorageWeakRef(t.untyped_storage()) for t in (output, *block.parameters())}
        made = {
            ref: size for ref, size in self._made.items() if not ref.expired() and ref not in others
        }
        hidden = args[0].untyped_storage()
        made[StorageWeakRef(hidden)] = hidden.nbytes()
        self.kept_bytes = sum(made.values())
        if backward:
            self._phase = self.backward
            with self:
                output.backward(torch.empty_like(output))
        return self

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self._phase[kind_of(func)] += 1
        self.names.add(str(func))
        for tensor in tree_leaves(out):
            # A tensor made of others (float8's) holds storages that were counted when those were
            # made.
            if isinstance(tensor, Tensor) and not is_traceable_wrapper_subclass(tensor):
                storage = tensor.untyped_storage()
                self._made.setdefault(StorageWeakRef(storage), storage.nbytes())
        return out


class _Found(Exception):
    pass


def arguments_of(
    block: nn.Module, model: nn.Module, tokens: Tensor, **more: Tensor
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments with which the model calls that block."""
    caught: list[Any] = []

    def catch(_: nn.Module, args: Any, kwargs: Any) -> None:
        caught.append((args, kwargs))
        raise _Found

    handle = block.register_forward_pre_hook(catch, with_kwargs=True)
    try:
        model(tokens, **more)
    except _Found:
        pass
    finally:
        handle.remove()
    args, kwargs = caught[0]
    return tuple(_leaf(value) for value in args), kwargs


def _leaf(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    return value.detach().requires_grad_(value.requires_grad)
