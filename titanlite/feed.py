"""The training loop's data: each step's micro-batches, or what stands for them where they do not come.

A rank whose storage does not answer would keep all ranks from stopping, until the scheduler kills them and what was
trained since the last save is lost. So a rank that was asked to stop waits a few seconds more, and then goes into the
step with text that counts for nothing (`train_step(void=True)`): the step changes nothing on any rank, all ranks learn
of it there, and save what they had before it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

from titanlite.build import to_device
from titanlite.config.plans import Plans
from titanlite.data.background import DataNotReadyError, Prefetcher, ValidationPrefetcher
from titanlite.data.loader import Batch
from titanlite.data.packing import IGNORE
from titanlite.preempt import GracefulStop
from titanlite.utils import logger


class Fetched(NamedTuple):
    """What a step is trained on."""

    #: This rank's micro-batches, on its device.
    batches: list[Batch]
    #: The loader's state before and after they were fetched.
    before: dict[str, Any]
    after: dict[str, Any]


class Feed:
    """What one rank trains on and validates with.

    loader, validation: where the batches come from; their `give_up` is set. asked: whether this rank or another was
    asked to stop. stop: says by what.
    """

    def __init__(
        self,
        loader: Prefetcher,
        validation: ValidationPrefetcher | None,
        stop: GracefulStop,
        asked: Callable[[], bool],
        plans: Plans,
        device: torch.device,
    ) -> None:
        self._loader, self._validation, self._stop, self._device = loader, validation, stop, device
        self._batch, self._held_out = plans.batch, plans.validation
        self._context = plans.mesh.context
        #: What the latest two steps were trained on: what is found bad is one of them.
        self.recent: dict[int, Fetched] = {}
        #: This rank has waited in vain, and has no data any more.
        self.void = False
        self._taken_back: dict[str, Any] | None = None
        loader.give_up = asked
        if validation is not None:
            validation.give_up = asked

    def step(self, number: int) -> list[Batch]:
        """This rank's micro-batches of the next step, on its device; waits for them, but see `void`."""
        before = self._loader.state_dict()
        try:
            batches = self._nothing() if self.void else self._loader.next_step()
        except DataNotReadyError as error:
            self._tell(f"step {number}", error)
            batches = self._nothing()
        batches = to_device(batches, self._device)
        self.recent[number] = Fetched(batches, before, self._loader.state_dict())
        self.recent.pop(number - 2, None)
        return batches

    def validation(self) -> Iterator[Batch]:
        """The batches of one validation, on the CPU; after a wait in vain one that counts for nothing, the last."""
        assert self._validation is not None
        try:
            yield from self._validation
        except DataNotReadyError as error:
            self._tell("the validation", error)
            yield _nothing(self._held_out.batch_size, self._held_out.seq_len // self._context)

    def take_back(self, step: int) -> None:
        """Stand where the data were before `step`, one of the latest two; nothing is fetched any more."""
        self._taken_back = self.recent[step].before

    def state_dict(self) -> dict[str, Any]:
        """The loader's state, where the next step that counts begins."""
        return self._loader.state_dict() if self._taken_back is None else dict(self._taken_back)

    def _nothing(self) -> list[Batch]:
        plan = self._batch
        return [_nothing(plan.micro_batch_size, plan.seq_len // self._context) for _ in range(plan.accumulation)]

    def _tell(self, what: str, error: DataNotReadyError) -> None:
        self.void = True
        reason = self._stop.reason or "another rank was asked to stop"
        logger.warning(f"{reason} while this rank waited for text for {what}: {error}. All ranks leave it out")


def _nothing(rows: int, length: int) -> Batch:
    """Text without a target, whose loss is zero."""
    return Batch(torch.zeros(rows, length, dtype=torch.int64), torch.full((rows, length), IGNORE))
