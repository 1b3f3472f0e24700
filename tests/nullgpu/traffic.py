"""What the kernels of a step read and write, by the tensors that they are given: a roofline's
bytes.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch._ops import HigherOrderOperator
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

#: Operators without a kernel of their own that no schema tells, and products, whose shapes are in
#: the null GPU's log.
_FREE = {"_unsafe_view", "lift_fresh", "resize_", "set_", "record_stream", "_local_scalar_dense"}
_PRODUCTS = {"mm", "addmm", "bmm", "baddbmm", "_scaled_mm", "_grouped_mm"}
#: Operators in place that do not read what they overwrite.
_OVERWRITES = {"copy_", "fill_", "zero_", "_foreach_copy_", "normal_", "uniform_"}
#: FLOPs of attention's backward over those of its forward: five products, not two.
_ATTENTION_BACKWARD = 2.5


def _bytes(tensors: Any) -> int:
    """Return the bytes of all tensors of a GPU. An expanded one has those of its storage."""
    found = (
        t for t in tree_leaves(tensors) if isinstance(t, torch.Tensor) and t.device.type == "cuda"
    )
    return sum(min(t.numel() * t.itemsize, t.untyped_storage().nbytes()) for t in found)


class Traffic(TorchDispatchMode):
    """Counts `moved`, bytes that all kernels but those of products and attention read and write;
    `attention`, FLOPs.

    Each kernel reads its inputs and writes its outputs once. torch's own count by operator;
    inductor's by kernel.
    """

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self.moved = 0
        self.attention = 0.0

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True  # compiled graphs run as they do without it

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if set(types) - {torch.Tensor, torch.nn.Parameter}:
            return NotImplemented  # of a subclass: its operators on plain tensors follow
        result = func(*args, **(kwargs or {}))
        if isinstance(
            func, HigherOrderOperator
        ):  # it restores random numbers, and runs its first argument
            func, *args = args
        name = func._schema.name.rpartition("::")[2]
        arguments = func._schema.arguments
        if (
            func.namespace not in ("aten", "fsdp")
            or func.is_view
            or name in _FREE | _PRODUCTS
            or "empty" in name
        ):
            return result
        given = dict(zip((a.name for a in arguments), args, strict=False)) | (kwargs or {})
        if "_attention" in name:
            q, k = given["query"], given["key"]  # [batch, heads, tokens, width]
            flops = 4 * q.numel() * k.shape[-2] * (0.5 if given.get("is_causal") else 1.0)
            self.attention += flops * (_ATTENTION_BACKWARD if "backward" in name else 1.0)
            return result
        changed = {a.name for a in arguments if a.alias_info is not None and a.alias_info.is_write}
        written = [value for key, value in given.items() if key in changed] or result
        read = [value for key, value in given.items() if key not in changed]
        if name == "embedding":
            read = [result]  # rows of the table
        elif name == "all_gather_copy_in":
            written = read = given["all_gather_inputs"]  # its results are views
        elif name.endswith("_like") or name.startswith("new_"):
            read = []
        elif name.endswith("_") and name not in _OVERWRITES:
            read = [read, written]
        self.moved += _bytes(read) + _bytes(written)
        return result

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Count the operators of torch and inductor's kernels inside."""
        from torch._inductor.runtime.triton_heuristics import CachingAutotuner

        run = CachingAutotuner.run

        def counted(kernel: Any, *args: Any, **kwargs: Any) -> Any:
            # What a kernel changes in place is one argument: read, and written.
            changed = [
                a
                for name, a in zip(kernel.fn.arg_names, args, strict=False)
                if name.startswith("in_out")
            ]
            self.moved += _bytes(args) + _bytes(changed)
            return run(kernel, *args, **kwargs)

        with mock.patch.object(CachingAutotuner, "run", counted), self:
            yield
