"""Live tensor bytes of a step by part, watched operator by operator.

The run is a real one on a CPU, or one without data.

    meter = MemoryMeter(model, optimizer, blocks, head)
    step.phase = meter.phase
    with meter:
        step(batches, 2, lr)
    memory = RankMemory(rank, meter.moments())

A storage counts until nothing refers to it. What it was for is decided at the end: what outlives
its module in the forward was kept for the backward.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves

from titanlite.plan.parts import PARTS, Moment

#: The method of `ShardingPropagator` that runs operators on tensors without data.
_SHAPES = "_propagate_tensor_meta_non_cached"
_FLOAT8 = {dtype for name, dtype in vars(torch).items() if name.startswith("float8_")}


@dataclass(slots=True, eq=False)
class _Storage:
    nbytes: int
    part: str | None
    #: Number of the visit in which it was made.
    born: int
    #: Number of the visit in which it was freed; None: it lives.
    died: int | None = None
    #: Tells its end.
    ref: weakref.ref[torch.UntypedStorage] | None = None


class _Visit(NamedTuple):
    """A module runs in a phase, while storages begin, end and change by so many bytes."""

    phase: str
    module: str
    events: list[tuple[_Storage, int]]


class MemoryMeter(TorchDispatchMode):
    """Measures the bytes of all storages that exist in a step.

    blocks: names of the model's blocks. head: name of the head. integer: what the host reads from
    an int64 tensor without data; others are read as 1.
    """

    supports_higher_order_operators = True

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        blocks: Collection[str],
        head: str,
        *,
        integer: int = 1,
    ) -> None:
        super().__init__()
        self._optimizer = optimizer
        self._head = head
        self._integer = integer
        #: FSDP puts others in their place while weights are gathered; these get the gradients.
        self._parameters = list(model.parameters())
        self._hooked = {id(parameter): parameter for parameter in self._parameters}
        self._live: dict[int, _Storage] = {}
        #: The first is of what lived before.
        self._visits = [_Visit("forward", "", []), _Visit("forward", "", [])]
        #: DTensor runs an operator without data at the size of all ranks, to learn the shape of its
        #: result.
        self._shapes_alone = False
        self._patches = contextlib.ExitStack()
        for tensor in (*self._parameters, *model.buffers()):
            self.track(tensor, "parameters")
        for name, module in _units(model, blocks):
            self._watch(name, module)

    def _watch(self, name: str, module: nn.Module) -> None:
        def before(*_: Any) -> None:
            self.enter("forward", name)

        def after(module: nn.Module, args: Any, output: Any) -> None:
            for parameter in module.parameters():
                # FSDP has put whole weights here, and reduces or adds up their gradients.
                if id(parameter) not in self._hooked and parameter.requires_grad:
                    self._hooked[id(parameter)] = parameter
                    parameter.register_post_accumulate_grad_hook(whole)
            for tensor in tree_leaves(output)[:1]:
                if isinstance(tensor, Tensor) and tensor.requires_grad:
                    tensor.register_hook(lambda _: self.enter("backward", name))

        def whole(parameter: Tensor) -> None:
            if parameter.grad is not None:
                self.track(parameter.grad, "communication", weak=True)

        # Before FSDP gathers the weights.
        module.register_forward_pre_hook(before, prepend=True)
        module.register_forward_hook(after, prepend=True)

    def phase(self, name: str) -> None:
        if name != "pipeline":
            self.enter(name, self._head if name == "backward" else "")

    def enter(self, phase: str, module: str) -> None:
        for parameter in self._parameters:
            if parameter.grad is not None:
                self.track(parameter.grad, "gradients")
        if self._visits[-1][:2] != (phase, module):
            self._visits.append(_Visit(phase, module, []))

    def track(self, tensor: Tensor, part: str | None = None, weak: bool = False) -> None:
        """Count the storages of a tensor.

        part: what they are for; None: decided later. weak: unless it is known.
        """
        if isinstance(tensor, DTensor):
            tensor = tensor._local_tensor
        if is_traceable_wrapper_subclass(tensor):
            for name in tensor.__tensor_flatten__()[0]:
                self.track(getattr(tensor, name), part, weak)
            return
        storage = tensor.untyped_storage()
        life = self._live.get(storage._cdata)
        if life is None:
            if part is None and tensor.dtype in _FLOAT8:
                part = "float8"
            self._add(storage, storage.nbytes(), part)
        elif part is not None and not (weak and life.part):
            life.part = part

    def _add(self, storage: torch.UntypedStorage, nbytes: int, part: str | None) -> None:
        key = storage._cdata
        life = _Storage(nbytes, part, self._now)

        def gone(_: object) -> None:
            self._visits[-1].events.append((life, -life.nbytes))
            life.died = self._now
            if self._live.get(key) is life:
                del self._live[key]

        life.ref = weakref.ref(storage, gone)
        self._live[key] = life
        self._visits[-1].events.append((life, nbytes))

    @property
    def _now(self) -> int:
        return len(self._visits) - 1

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._shapes_alone:
            return func(*args, **(kwargs or {}))
        if any(map(_holds_others, types)):
            # What it does with the tensors inside of it comes here, operator by operator.
            return NotImplemented
        if args and isinstance(args[0], FakeTensor):
            if func is torch.ops.prim.device.default:
                # Most calls of a run without data; to dispatch it further takes its time.
                return args[0].fake_device
            if func is torch.ops.aten._local_scalar_dense.default:
                return self._read(args[0].dtype)
            if func is torch.ops._c10d_functional.wait_tensor.default:
                # As with data; without data it would be a tensor beside the one that it waits for.
                return args[0]
        given = kwargs or {}
        out = func(*args, **given)
        for tensor in [out] if isinstance(out, Tensor) else _tensors(out):
            self.track(tensor)
        part = _marked(func)
        if part:
            marked = given.get("out") if part == "gathered weights" else (args, given)
            for tensor in _tensors(marked):
                self.track(tensor, part, weak=True)
        return out

    def _read(self, dtype: torch.dtype) -> int:
        if dtype == torch.bool:
            return True
        return self._integer if dtype == torch.int64 else 1

    def __enter__(self) -> MemoryMeter:
        self._patches.enter_context(
            mock.patch.object(torch.UntypedStorage, "resize_", self._resizing())
        )
        self._patches.enter_context(
            mock.patch.object(ShardingPropagator, _SHAPES, self._unmetered())
        )
        self._track_state()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        self._patches.close()
        super().__exit__(*error)
        self._track_state()

    def _resizing(self) -> Any:
        """No operator shows `UntypedStorage.resize_`."""
        real = torch.UntypedStorage.resize_

        def resize(storage: torch.UntypedStorage, nbytes: int) -> Any:
            life, result = self._live.get(storage._cdata), real(storage, nbytes)
            if life is None:
                self._add(storage, nbytes, "gathered weights")
            else:
                self._visits[-1].events.append((life, nbytes - life.nbytes))
                life.nbytes, life.part = nbytes, "gathered weights"
            return result

        return resize

    def _unmetered(self) -> Any:
        """The tensors of DTensor's method `_SHAPES` have no bytes."""
        real = getattr(ShardingPropagator, _SHAPES)

        def propagate(*args: Any) -> Any:
            self._shapes_alone = True
            try:
                return real(*args)
            finally:
                self._shapes_alone = False

        return propagate

    def _track_state(self) -> None:
        for tensor in _tensors(dict(self._optimizer.state)):
            self.track(tensor, "optimizer")

    def restart(self) -> None:
        """Forget what was measured, but not what lives."""
        self._track_state()
        before = _Visit("forward", "", [])
        for life in self._live.values():
            life.born = 0
            before.events.append((life, life.nbytes))
        self._visits = [before, _Visit("forward", "", [])]

    def moments(self) -> tuple[Moment, ...]:
        """Return the peak within each visit of a module since `restart`."""
        found: list[Moment] = []
        now = Counter[str]()
        total = 0
        for phase, module, events in self._visits:
            most = total
            parts = dict(now)
            for life, delta in events:
                now[self._part(life)] += delta
                total += delta
                if total > most:
                    most = total
                    parts = dict(now)
            found.append(Moment(phase, module, {part: parts.get(part, 0) for part in PARTS}))
        return tuple(found[1:])

    def _part(self, life: _Storage) -> str:
        if life.part:
            return life.part
        made = self._visits[life.born]
        if made.module == self._head:
            return "logits and loss"
        kept = made.phase == "forward" and life.died != life.born
        return "activations" if kept else "working memory"


def _tensors(values: object) -> list[Tensor]:
    return [value for value in tree_leaves(values) if isinstance(value, Tensor)]


@functools.cache
def _holds_others(kind: type) -> bool:
    return hasattr(kind, "__tensor_flatten__")


@functools.cache
def _marked(func: Any) -> str | None:
    name = str(func)
    if name.startswith("fsdp.split_with_sizes_copy"):
        return "gathered weights"
    collective = func.namespace == "c10d" and "send" not in name
    if collective or name.startswith(("fsdp.chunk_cat", "fsdp.all_gather_copy_in")):
        return "communication"
    return None


def _units(
    model: nn.Module, blocks: Collection[str], prefix: str = ""
) -> Iterator[tuple[str, nn.Module]]:
    for key, module in model.named_children():
        name = prefix + key
        if name not in blocks and any(block.startswith(f"{name}.") for block in blocks):
            yield from _units(module, blocks, f"{name}.")
        else:
            yield name, module
