"""The check that the per-op policy saves something in a block of a model that titanlite does not
know.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from titanlite.dist import ParallelismError
from titanlite.parallel.activation_checkpoint import kind_of


def check_policy(
    model: nn.Module,
    names: Sequence[str],
    tokens: tuple[int, int],
    device: torch.device,
) -> None:
    """Run one block forward on tensors without data, and look for an operator of the policy.

    model: on the meta device, without checkpointing; do not use it afterwards. names: its blocks.
    tokens: (batch, seq) of a micro-batch. device: of the real run. Raises ParallelismError when
    there is none.
    """
    # Grouped products of tensors without data have no other type.
    model.to(torch.bfloat16)
    seen: set[str] = set()
    with FakeTensorMode(allow_non_fake_inputs=True):
        # Like `to_empty`, which would load a part of the compiler for meta tensors.
        model._apply(lambda tensor: torch.empty(tensor.shape, dtype=tensor.dtype, device=device))
        block = model.get_submodule(names[0])
        inputs = torch.zeros(tokens, dtype=torch.int64, device=device)
        args, kwargs = arguments_of(block, model, inputs)
        with _Names(seen) as operators:
            block(*args, **kwargs)
    if not operators.has_saved:
        raise ParallelismError(
            f'"op" saves nothing in {names[0]}: none of its operators is in the policy '
            f"({', '.join(sorted(seen))})"
        )


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


class _Names(TorchDispatchMode):
    """Notes the names of operators, and whether the policy saves one of them."""

    supports_higher_order_operators = True  # flex_attention is one

    def __init__(self, seen: set[str]) -> None:
        super().__init__()
        self.seen = seen
        self.has_saved = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.add(str(func))
        self.has_saved = self.has_saved or bool(kind_of(func))
        return func(*args, **(kwargs or {}))
