"""Keep saved activations in host memory until their backward.

Built on autograd's saved-tensor hooks, which torch 2.11 and 2.13 both have (checkpoint policies
offload only under `torch.compile`). Unlike `torch.autograd.graph.save_on_cpu` they leave weights
and tables on the device. They move a tensor once that several operators save, and copy beside the
computation.
"""

from __future__ import annotations

import functools
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

#: Smaller tensors stay: a copy of any size costs some microseconds.
LEAST_BYTES = 1 << 16
#: Copies to the host under way at once. Their sources stay on the device, and the computation waits
#: for the oldest.
MOST_LEAVING = 2


class HostMemory:
    """Page-locked memory beside a CUDA device, reached over a stream of its own: copies run beside
    the computation.

    A fetch also begins to copy back the tensor that was sent before, which a backward needs next.
    Device memory on both ends belongs to the computation's stream, which waits for the other one.
    With `Tensor.record_stream` instead, the allocator would take new memory as far as the host runs
    ahead of the device.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = torch.cuda.Stream(device)
        self._latest: weakref.ref[OffloadedTensor] | None = None
        self._leaving: deque[tuple[Tensor, torch.cuda.Event]] = deque()

    def send(self, tensor: Tensor) -> OffloadedTensor:
        offloaded = OffloadedTensor(self, tensor, self._latest)
        self._latest = weakref.ref(offloaded)
        self._leaving.append((tensor, self.stream.record_event()))
        self.let_go(MOST_LEAVING)
        return offloaded

    def let_go(self, most: int) -> None:
        """Hold no more than `most` tensors for their copy to the host; later computation waits for
        those copies.
        """
        current = torch.cuda.current_stream(self.device)
        while len(self._leaving) > most:
            current.wait_event(self._leaving[0][1])
            self._leaving.popleft()


class OffloadedTensor:
    """A tensor whose values are in host memory."""

    def __init__(
        self, host: HostMemory, tensor: Tensor, before: weakref.ref[OffloadedTensor] | None
    ) -> None:
        self._copy: Tensor | None = None
        self._arrived: torch.cuda.Event | None = None
        self.host, self._before = host, before
        self._given: weakref.ref[Tensor] | None = None
        self.held = torch.empty_like(tensor, device="cpu", pin_memory=True)
        host.stream.wait_stream(torch.cuda.current_stream(host.device))
        with torch.cuda.stream(host.stream):
            self.held.copy_(tensor, non_blocking=True)

    def begin(self) -> None:
        """Start the copy back, if it is neither under way nor done."""
        if self._copy is not None or (self._given is not None and self._given() is not None):
            return
        stream, device = self.host.stream, self.host.device
        self._copy = torch.empty_like(self.held, device=device)
        stream.wait_stream(
            torch.cuda.current_stream(device)
        )  # which may still use what was in this memory before
        with torch.cuda.stream(stream):
            self._copy.copy_(self.held, non_blocking=True)
        self._arrived = stream.record_event()

    def fetch(self) -> Tensor:
        """Return the tensor on its device."""
        given = self._given() if self._given is not None else None
        if given is not None:
            return given  # another operator that saved the same tensor still holds it
        self.host.let_go(0)
        self.begin()
        tensor, arrived = self._copy, self._arrived
        assert tensor is not None and arrived is not None
        torch.cuda.current_stream(self.host.device).wait_event(arrived)
        self._copy, self._given = None, weakref.ref(tensor)
        before = self._before() if self._before is not None else None
        if before is not None:
            before.begin()
        return tensor

    def __del__(self) -> None:
        if self._copy is not None and self._arrived is not None:
            # Begun, but no backward needed it: its memory must not be used again before the copy is
            # done.
            torch.cuda.current_stream(self.host.device).wait_event(self._arrived)


def offload(
    block: nn.Module, host: HostMemory, model: nn.Module, least_bytes: int = LEAST_BYTES
) -> None:
    """Let `host` hold the tensors that calls of `block` save for their backward, in place; names
    stay as they are.

    Weights, buffers of `model` and arguments without a gradient (masks, which all blocks share)
    stay on the device. The hooks surround the block's call. So they also work on a compiled or
    checkpointed block, whose saved tensors are its inputs.
    """
    object.__setattr__(block, "_offload", (host, model.buffers, least_bytes))
    cls: Any = type(block)
    block.__class__ = _offloaded(cls)


@functools.cache
def _offloaded(cls: type[nn.Module]) -> type:
    class Offloaded(cls):  # type: ignore[valid-type,misc]
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            with _sending(self, [*args, *kwargs.values()]):
                return super().__call__(*args, **kwargs)

    Offloaded.__name__ = Offloaded.__qualname__ = f"Offloaded{cls.__name__}"
    return Offloaded


@contextmanager
def _sending(block: nn.Module, arguments: list[Any]) -> Iterator[None]:
    host, buffers, least_bytes = block._offload  # type: ignore[misc]
    stay: set[int] = set()
    # Holds the tensors themselves until the block is done, so that an address means one tensor.
    sent: dict[tuple[Any, ...], tuple[Tensor, OffloadedTensor]] = {}

    def pack(tensor: Tensor) -> Callable[[], Tensor]:
        if not stay:
            # Not earlier: the weights of a sharded block are gathered inside its call.
            shared = [a for a in arguments if isinstance(a, Tensor) and not a.requires_grad]
            stay.update(_storage(_local(t)) for t in (*block.parameters(), *buffers(), *shared))
        local = _local(tensor)
        # A tensor made of others is torchao's: a weight gathered in float8, or an input cast to
        # float8.
        if is_traceable_wrapper_subclass(local):
            return lambda: tensor
        if (
            local.device.type != host.device.type
            or local.nbytes < least_bytes
            or _storage(local) in stay
        ):
            return lambda: tensor
        layout = (local.shape, local.stride(), local.storage_offset())
        whole = local.nbytes == local.untyped_storage().nbytes()
        if whole:
            # As one flat tensor: views of it in other shapes are then sent once.
            local = local.as_strided((local.numel(),), (1,), 0)
        key = (
            _storage(local),
            local.storage_offset(),
            local.shape,
            local.stride(),
            local.dtype,
            local._version,
        )
        if key not in sent:
            sent[key] = local, host.send(local)
        offloaded = sent[key][1]

        def fetch() -> Tensor:
            fetched = offloaded.fetch()
            return fetched.as_strided(*layout) if whole else fetched

        return _fetch_sharded(fetch, tensor) if isinstance(tensor, DTensor) else fetch

    with saved_tensors_hooks(pack, lambda fetch: fetch()):
        yield
    # The graph holds `pack`, and so these variables, until the backward.
    sent.clear()
    arguments.clear()


def _fetch_sharded(fetch: Callable[[], Tensor], tensor: DTensor) -> Callable[[], Tensor]:
    mesh, placements, shape, stride = (
        tensor.device_mesh,
        tensor.placements,
        tensor.shape,
        tensor.stride(),
    )
    return lambda: DTensor.from_local(
        fetch(), mesh, placements, run_check=False, shape=shape, stride=stride
    ).detach()


def _local(tensor: Tensor) -> Tensor:
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata
