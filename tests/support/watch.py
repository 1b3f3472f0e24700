"""What tests observe below a model: operators, and the bytes of collectives."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from tests.support.harness import Run, stepper
from titanlite.dist.dist_env import DistEnv

GATHER = "allgather_base"
REDUCE = "reduce_scatter_base"
SUM = "allreduce"


class Watch(TorchDispatchMode):
    """Calls note(func, args, output) for every operator; of operators on DTensors, the
    outer ones.
    """

    def __init__(self, note: Callable[[Any, Any, Any], object]) -> None:
        super().__init__()
        self.note = note

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        self.note(func, args, output)
        return output


class Operators(Watch):
    """Counts operators by name."""

    def __init__(self) -> None:
        super().__init__(lambda func, args, output: self.seen.update([str(func)]))
        self.seen: Counter[str] = Counter()


@dataclass(frozen=True)
class Sent:
    """One collective: bytes that this rank puts in and gets out."""

    name: str
    dtype: torch.dtype
    bytes_in: int
    bytes_out: int


class Wire(Watch):
    """Hands every collective of c10d to `told`, as soon as it is called."""

    def __init__(self, told: Callable[[Sent], object]) -> None:
        super().__init__(self._look)
        self.told = told

    def _look(self, func: Any, args: Any, output: Any) -> None:
        if func.namespace == "c10d" and "barrier" not in str(func):
            name = str(func).split(".")[1].strip("_")
            out = _first(args[0])
            into = out if name in (SUM, "send", "recv") else _first(args[1])
            self.told(Sent(name, into.dtype, into.nbytes, out.nbytes))


def _first(value: Any) -> torch.Tensor:
    while isinstance(value, (list, tuple)):
        value = value[0]
    return value


def collectives(world: DistEnv, run: Run) -> list[Sent]:
    """The collectives of a second step: in the first one FSDP sets itself up."""
    _, _, take = stepper(world, run)
    seen: list[Sent] = []
    take(1)
    with Wire(seen.append):
        take(2)
    return seen


#: Ways to read a tensor from Python. `tolist` and `numpy` of a CPU tensor reach no operation at
#: all.
READS = {"tolist", "numpy", "cpu", "item", "nonzero", "equal", "masked_select", "unique"} | {
    f"__{name}__" for name in ("bool", "int", "float", "index", "complex", "array", "contains")
}
#: The same below Python, where optimizers, autograd and FSDP may do it.
READING_OPERATIONS = {
    torch.ops.aten._local_scalar_dense.default,
    torch.ops.aten.is_nonzero.default,
    torch.ops.aten.nonzero.default,
    torch.ops.aten.equal.default,
    torch.ops.aten.masked_select.default,
}


class Operations(Watch):
    """Counts collectives of all groups, by name and dtype of what is sent, and reads of values by
    the host.
    """

    def __init__(self) -> None:
        super().__init__(self._count)
        self.sent: Counter[tuple[str, str]] = Counter()
        self.reads = 0

    def _count(self, func: Any, args: Any, output: Any) -> None:
        if func.namespace in ("c10d", "_c10d_functional"):
            tensors = [
                t for t in torch.utils._pytree.tree_leaves(args) if isinstance(t, torch.Tensor)
            ]
            self.sent[str(func).split(".")[1], str(tensors[0].dtype) if tensors else ""] += 1
        self.reads += func in READING_OPERATIONS


class Calls(TorchFunctionMode):
    """Counts the same reads where Python asks for them, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.reads: Counter[str] = Counter()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name in READS:
            self.reads[name] += 1
        return func(*args, **(kwargs or {}))


def count_collectives(world: DistEnv, run: Run) -> Counter[tuple[str, torch.dtype]]:
    """The collectives of a second step, by name and type of what is sent."""
    return Counter((sent.name, sent.dtype) for sent in collectives(world, run))
