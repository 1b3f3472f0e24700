"""Activation checkpointing (AC): which activations of a block live until its backward, and which
are recomputed.

    # before compile and FSDP
    apply_ac(model, spec.block_names(args), ActivationCheckpoint(mode="full"), device)

A block gets a subclass of its own class, as with `fully_shard`, instead of a wrapper around it. No
module is added, so names of parameters and keys of state dictionaries are the same in every mode.
Hooks of `fully_shard` stay outside of the recomputation, so weights are gathered no more often.
Blocks of one class stay one class to `torch.compile`, which compiles them once.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.modules.dropout import _DropoutNd
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from titanlite.parallel.feature_linear import adapter_rank

if TYPE_CHECKING:
    from titanlite.config.sections import ActivationCheckpoint

#: Matrix products: every second one is saved, the first included. By overload: `aten.mm` alone
#: matches nothing. Batched products are left out: attention without its own kernel consists of
#: them. Recomputation exists to avoid their scores, [batch, heads, seq, seq].
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
#: twice. A maximum, float8's scale, is one number.
OTHERS = (
    "_c10d_functional.reduce_scatter_tensor.default",
    "_c10d_functional.all_to_all_single.default",
    "aten.max.default",
    "titanlite.sizes_on_host.default",  # rows for experts of other ranks: the host waits for them
)

#: Operator → its kind, for all that the policy knows.
KINDS = {
    **dict.fromkeys(MATMULS, "matmul"),
    **dict.fromkeys(ATTENTION, "attention"),
    **dict.fromkeys(OTHERS, "other"),
}


#: Makes the contexts of a forward and of its recomputation.
Contexts = Callable[[], tuple[AbstractContextManager[Any], AbstractContextManager[Any]]]


@functools.cache
def kind_of(op: Any) -> str:
    """Return "matmul", "attention" or "other" for operators of the policy; "" for every
    other one.
    """
    is_overload = isinstance(op, torch._ops.OpOverload)
    name = str(op) if is_overload else f"higher_order.{op.name()}"
    return KINDS.get(name, "")


class OpPolicy:
    """The per-op policy of one pass through a block: attention and every second product, the first
    included.

    narrow: width of adapters (0: none), whose cheap products are repeated and do not count.
    """

    def __init__(self, narrow: int = 0) -> None:
        self._narrow = narrow
        # Some versions of torch also ask during recomputation: its own count gives the same
        # answers again.
        self._matmuls = {False: 0, True: 0}

    def __call__(self, context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        kind = kind_of(op)
        save = kind in ("attention", "other")
        if kind == "matmul":
            matrices = [one for one in args if isinstance(one, torch.Tensor) and one.ndim == 2]
            is_narrow = any(self._narrow in one.shape for one in matrices)
            if not (self._narrow and is_narrow):
                self._matmuls[context.is_recompute] += 1
                save = self._matmuls[context.is_recompute] % 2 == 1
        return CheckpointPolicy.MUST_SAVE if save else CheckpointPolicy.PREFER_RECOMPUTE


@functools.cache
def contexts_by_op(narrow: int = 0) -> Contexts:
    """Return what makes contexts for `torch.utils.checkpoint`, one object for all blocks.

    Each call has a new `OpPolicy`, which counts from zero.
    """
    return lambda: create_selective_checkpoint_contexts(OpPolicy(narrow))


def apply_ac(
    model: nn.Module, names: Sequence[str], settings: ActivationCheckpoint, device: torch.device
) -> list[str]:
    """Apply activation checkpointing to the blocks of a model in place.

    Return the names of those that recompute.

    names: all blocks in the order they run. One that this model lacks (another pipeline stage's) is
    skipped but counts. So the choice does not depend on how blocks are divided.
    device: where the model will run, for offload.
    """
    modules = dict(model.named_modules())
    chosen = {name for name in recomputed_blocks(names, settings) if name in modules}
    blocks = {name: modules[name] for name in names if name in modules}
    for name, block in blocks.items():
        if name in chosen:
            checkpoint_block(block, settings.by_op)
        if settings.mode == "budget":
            cls: Any = type(block)
            block.__class__ = _budgeted(cls, settings.memory_budget)
    if settings.offload and device.type == "cuda":  # on a CPU all is in host memory
        from titanlite.parallel.host_memory import HostMemory
        from titanlite.parallel.offload_blocks import offload

        host = HostMemory(device)
        for block in blocks.values():
            offload(block, host, model)
    return [name for name in names if name in chosen]


def recomputed_blocks(names: Sequence[str], settings: ActivationCheckpoint) -> list[str]:
    """Return the blocks that recompute: all, every Nth (the Nth, the 2Nth, …), or none."""
    if settings.mode in ("none", "budget"):
        return []
    if settings.mode == "full" or settings.by_op:
        return list(names)
    every = int(settings.selective_ac_option)
    return list(names[every - 1 :: every])


def checkpoint_block(block: nn.Module, by_op: bool) -> None:
    """Let a block recompute, in place. by_op: all but what `OpPolicy` saves."""
    # To draw the same numbers again, each forward copies the generators' states; a block that draws
    # none needs no copy.
    draws = any(map(_draws, block.modules()))
    # Tensors that a block sends to other ranks are kept, even in full recomputation.
    contexts: Contexts | None = getattr(exchange_of(block), "contexts", None)
    if by_op:
        contexts = contexts_by_op(adapter_rank(block))
    cls: Any = type(block)
    block.__class__ = _checkpointed(cls, contexts, draws)


def exchange_of(block: nn.Module) -> Any:
    """Return what moves rows of a block to other ranks (`exchange` of a module in it), or None."""
    for module in block.modules():
        # A module of a user may call something else so.
        exchange = getattr(module, "exchange", None)
        if hasattr(exchange, "contexts"):
            return exchange
    return None


#: Packages whose modules draw nothing but dropout.
_KNOWN = ("torch", "torchao", "titanlite", "builtins")


def _draws(module: nn.Module) -> bool:
    """Whether a module may draw random numbers, also by code of others."""
    if isinstance(module, _DropoutNd) and module.p > 0:
        return True
    for name, value in vars(module).items():
        if "drop" in name and isinstance(value, float) and value > 0:
            return True
    packages = {cls.__module__.partition(".")[0] for cls in type(module).mro()}
    return not packages.issubset(_KNOWN)


# One class for all blocks: torch.compile compiles each class by itself.
@functools.cache
def _checkpointed(
    cls: type[nn.Module], contexts: Contexts | None, preserve_rng_state: bool
) -> type:
    options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": preserve_rng_state}
    if contexts is not None:
        options["context_fn"] = contexts

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
    settings: dict[str, Any] = {"activation_memory_budget": budget}
    unknown_size = "unsafe_treat_script_objects_as_zero_size"
    if hasattr(config, unknown_size):  # from torch 2.13
        settings[unknown_size] = True

    class Budgeted(cls):  # type: ignore[valid-type,misc]
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            # The first call reads them when it compiles the block. Outside of the call they are
            # unchanged.
            with config.patch(settings):
                return super().__call__(*args, **kwargs)

    Budgeted.__name__ = Budgeted.__qualname__ = f"Budgeted{cls.__name__}"
    return Budgeted
