"""Activation checkpointing (AC): which activations of a block live until its backward, and which
are recomputed.

    # before compile and FSDP
    apply_ac(model, spec.block_names(args), ActivationCheckpoint(mode="full"), device)
    stats = trace_block(model_on_meta, spec.block_names(args), activation_checkpoint, (batch, seq),
        device, dtype)

A block gets a subclass of its own class, as with `fully_shard`, instead of a wrapper around it. No
module is added, so names of parameters and keys of state dictionaries are the same in every mode.
Hooks of `fully_shard` stay outside of the recomputation, so weights are gathered no more often.
Blocks of one class stay one class to `torch.compile`, which compiles them once.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.modules.dropout import _DropoutNd
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from titanlite.parallel import ParallelismError
from titanlite.parallel.activation_offload import HostMemory, offload

if TYPE_CHECKING:
    from titanlite.config.sections import ActivationCheckpoint

#: Matrix products: every second one is saved, the first included. By overload: `aten.mm` alone
#: matches nothing. Batched products are left out: attention without a kernel of its own consists of
#: them, and recomputation exists to avoid their scores, [batch, heads, seq, seq].
MATMULS = (
    "aten.mm.default",
    "aten.addmm.default",
    "aten._scaled_mm.default",  # float8
    "aten._scaled_mm_v2.default",
    "aten._grouped_mm.default",  # experts
    "titanlite.grouped_mm.default",  # the same in float32
    "aten._scaled_grouped_mm.default",
)
#: Attention kernels: always saved. They cost most to repeat, and return little beside their input.
ATTENTION = (
    "aten._scaled_dot_product_flash_attention.default",
    "aten._scaled_dot_product_efficient_attention.default",
    "aten._scaled_dot_product_cudnn_attention.default",
    "aten._scaled_dot_product_flash_attention_for_cpu.default",
    "aten._scaled_dot_product_fused_attention_overrideable.default",
    "aten._flash_attention_forward.default",
    "aten._efficient_attention_forward.default",
    "aten._cudnn_attention_forward.default",
    "torch_attn._varlen_attn.default",
    "higher_order.flex_attention",
)
#: Always saved as well: a reduction over ranks, and rows for experts of other ranks, would be sent
#: twice; a maximum, float8's scale, is one number.
OTHERS = (
    "_c10d_functional.reduce_scatter_tensor.default",
    "_c10d_functional.all_to_all_single.default",
    "aten.max.default",
)


_KINDS = {
    name: kind
    for kind, names in (("matmul", MATMULS), ("attention", ATTENTION), ("other", OTHERS))
    for name in names
}


@functools.cache
def kind_of(op: Any) -> str:
    """Return "matmul", "attention" or "other" for the operators of the policy; "" for every other
    operator.
    """
    return _KINDS.get(
        str(op) if isinstance(op, torch._ops.OpOverload) else f"higher_order.{op.name()}", ""
    )


class OpPolicy:
    """The per-op policy of one pass through a block: attention and every second product, the first
    included.
    """

    def __init__(self) -> None:
        # Some versions of torch also ask during recomputation: a count of its own gives the same
        # answers again.
        self._matmuls = {False: 0, True: 0}

    def __call__(self, context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        """Decide whether to keep the output of `op` for the backward."""
        kind = kind_of(op)
        save = kind in ("attention", "other")
        if kind == "matmul":
            self._matmuls[context.is_recompute] += 1
            save = self._matmuls[context.is_recompute] % 2 == 1
        return CheckpointPolicy.MUST_SAVE if save else CheckpointPolicy.PREFER_RECOMPUTE


def save_by_op() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """Return contexts for `torch.utils.checkpoint` with a new `OpPolicy`, which counts from
    zero.
    """
    return create_selective_checkpoint_contexts(OpPolicy())


def apply_ac(
    model: nn.Module, names: Sequence[str], settings: ActivationCheckpoint, device: torch.device
) -> list[str]:
    """Apply activation checkpointing to the blocks of a model in place.

    Return the names of those that recompute.

    names: all blocks in the order they run. One that this model lacks (another pipeline stage's) is
    skipped but counts: the choice does not depend on how blocks are divided.
    device: where the model will run. Offload is for accelerators: a CPU's activations are in host
    memory already.
    """
    modules = dict(model.named_modules())
    chosen = {name for name in recomputed_blocks(names, settings) if name in modules}
    host = HostMemory(device) if settings.offload and device.type == "cuda" else None
    for name in filter(modules.__contains__, names):
        block = modules[name]
        if name in chosen:
            _checkpoint(block, is_by_op(settings))
        if settings.mode == "budget":
            cls: Any = type(block)
            block.__class__ = _budgeted(cls, settings.memory_budget)
        if host is not None:
            offload(block, host, model)
    return [name for name in names if name in chosen]


def is_by_op(settings: ActivationCheckpoint) -> bool:
    """Whether `OpPolicy` decides inside each block."""
    return settings.mode == "selective" and settings.selective_ac_option == "op"


def recomputed_blocks(names: Sequence[str], settings: ActivationCheckpoint) -> list[str]:
    """Return the blocks that recompute: all, every Nth (the Nth, the 2Nth, …), or none of them."""
    if settings.mode in ("none", "budget"):
        return []
    every = (
        1 if settings.mode == "full" or is_by_op(settings) else int(settings.selective_ac_option)
    )
    return list(names[every - 1 :: every])


def _checkpoint(block: nn.Module, by_op: bool) -> None:
    # To draw the same numbers again, each forward copies the generators' states; a block that draws
    # none needs no copy.
    draws = any(map(_draws, block.modules()))
    cls: Any = type(block)
    block.__class__ = _checkpointed(cls, by_op, draws)


#: Packages whose modules draw nothing but dropout.
_KNOWN = ("torch", "torchao", "titanlite", "builtins")


def _draws(module: nn.Module) -> bool:
    """Whether a module may draw: as a dropout layer, by a rate that it hands to a function, or in
    code of others.
    """
    rates = (
        value for name, value in vars(module).items() if "drop" in name and isinstance(value, float)
    )
    known = all(cls.__module__.partition(".")[0] in _KNOWN for cls in type(module).mro())
    return (
        isinstance(module, _DropoutNd)
        and module.p > 0
        or any(rate > 0 for rate in rates)
        or not known
    )


@functools.cache  # one class for all blocks: torch.compile would compile each class anew
def _checkpointed(cls: type[nn.Module], by_op: bool, preserve_rng_state: bool) -> type:
    options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": preserve_rng_state}
    if by_op:
        options["context_fn"] = save_by_op

    class Checkpointed(cls):  # type: ignore[valid-type,misc]
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return checkpoint(super().forward, *args, **options, **kwargs)

    Checkpointed.__name__ = Checkpointed.__qualname__ = f"Checkpointed{cls.__name__}"
    return Checkpointed


@functools.cache
def _budgeted(cls: type[nn.Module], budget: float) -> type:
    from torch._functorch import config

    # Under tensor parallelism a device mesh is among the inputs of the graph. It holds no
    # activations, but torch refuses to divide a graph with an input of unknown size.
    settings: dict[str, Any] = {
        "activation_memory_budget": budget,
        "unsafe_treat_script_objects_as_zero_size": True,
    }

    class Budgeted(cls):  # type: ignore[valid-type,misc]
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            # The first call reads them when it compiles the block. Outside of the call they are
            # unchanged.
            with config.patch(settings):
                return super().__call__(*args, **kwargs)

    Budgeted.__name__ = Budgeted.__qualname__ = f"Budgeted{cls.__name__}"
    return Budgeted


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

    Raises ParallelismError when the per-op policy saves nothing in a block.
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
        args, kwargs = _arguments_of(
            block, model, torch.zeros(tokens, dtype=torch.int64, device=device), **one
        )
        plain = traced = _Recorder().run(block, args, kwargs, backward=bool(chosen))
        if chosen:
            _checkpoint(block, is_by_op(settings))
            traced = _Recorder().run(block, args, kwargs)
    if is_by_op(settings) and not any(plain.forward[kind] for kind in _KINDS.values()):
        seen = ", ".join(sorted(traced.names))
        raise ParallelismError(
            f'"op" saves nothing in {names[0]}: none of its operators is in the policy ({seen})'
        )
    matmuls, attention = plain.forward["matmul"], plain.forward["attention"]
    return ActivationStats(
        blocks=len(names),
        recomputing=len(chosen),
        forward={"matmul": matmuls, "attention": attention},
        saved={"matmul": (matmuls + 1) // 2, "attention": attention} if is_by_op(settings) else {},
        recomputed={
            kind: traced.backward[kind] - plain.backward[kind] for kind in ("matmul", "attention")
        },
        block_bytes=traced.kept_bytes,
        plain_bytes=plain.kept_bytes,
        kernels=tuple(sorted(name for name in plain.names if name in ATTENTION)),
    )


class _Found(Exception):
    pass


def _arguments_of(
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
    return tuple(
        a.detach().requires_grad_(a.requires_grad) if isinstance(a, Tensor) else a for a in args
    ), kwargs


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
