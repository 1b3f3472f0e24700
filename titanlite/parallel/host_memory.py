"""Host memory that holds tensors of a GPU: copies to it and back run beside the computation."""

from __future__ import annotations

import weakref
from collections import deque

import torch
from torch import Tensor

#: Copies to the host under way at once: their sources stay on the device, and the computation waits
#: for the oldest.
MOST_LEAVING = 2


class HostMemory:
    """Page-locked memory beside a CUDA device, with its own stream: copies run beside the
    computation.

    A fetch also starts the copy back of the tensor sent before, which a backward needs next. Device
    memory is of the computation's stream, which waits for copies: with `Tensor.record_stream` the
    allocator would take more the further the host runs ahead.
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
        """Hold at most `most` tensors for their copy to the host, for which later computation
        waits.
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
