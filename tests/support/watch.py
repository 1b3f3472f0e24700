"""What tests observe below a model: operators, and the bytes of collectives."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.support.harness import Run, stepper
from titanlite.parallel.dist_env import DistEnv

GATHER, REDUCE, SUM = "allgather_base", "reduce_scatter_base", "allreduce"


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


class Wire(TorchDispatchMode):
    """Hands every collective of c10d to `note`, before it runs."""

    def __init__(self, note: Callable[[Sent], object]) -> None:
        super().__init__()
        self.note = note

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d" and "barrier" not in str(func):
            name = str(func).split(".")[1].strip("_")
            out = _first(args[0])
            into = out if name in (SUM, "send", "recv") else _first(args[1])
            self.note(Sent(name, into.dtype, into.nbytes, out.nbytes))
        return func(*args, **(kwargs or {}))


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
