"""The training loop's data: each step's micro-batches."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from titanlite.build import to_device
from titanlite.data.loader import Batch
from titanlite.data.prefetch import Prefetcher, ValidationPrefetcher


class Fetched(NamedTuple):
    """What a step is trained on."""

    #: This rank's micro-batches, on its device.
    batches: list[Batch]
    #: The loader's state before and after they were fetched.
    before: dict[str, Any]
    after: dict[str, Any]


class Feed:
    """The batches that one rank trains on and validates with."""

    def __init__(self, loader: Prefetcher, validation: ValidationPrefetcher | None, device: torch.device) -> None:
        self._loader, self._validation, self._device = loader, validation, device
        #: The data of the latest two steps: a step that is found bad is one of them.
        self.recent: dict[int, Fetched] = {}
        #: No step is void any more: nobody gives up waiting for data.
        self.void = False

    def step(self, number: int) -> list[Batch]:
        """Return this rank's micro-batches of the next step, on its device."""
        before = self._loader.state_dict()
        batches = to_device(self._loader.next_step(), self._device)
        self.recent[number] = Fetched(batches, before, self._loader.state_dict())
        self.recent.pop(number - 2, None)
        return batches

    def validation(self) -> Iterator[Batch]:
        """Iterate over the batches of one validation, on the CPU."""
        assert self._validation is not None
        yield from self._validation

    def take_back(self, step: int) -> None:
        """Never happens, as no step is void."""

    def state_dict(self) -> dict[str, Any]:
        """Return the loader's state after the last step."""
        return self._loader.state_dict()
