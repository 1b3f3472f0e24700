"""Callbacks that put faults into a run, which a proof must find."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from titanlite.callbacks import Callback
from titanlite.dist.local_parts import local, plain

if TYPE_CHECKING:
    from titanlite.step import StepResult
    from titanlite.trainer import Trainer


class Moment(Callback):
    """Flips a bit of the largest number in a tensor of the optimizer's state, on each rank."""

    def on_start(self, trainer: Trainer) -> None:
        for state in trainer.parts.optimizer.state.values():
            for part in map(local, state.values()):
                if part.is_floating_point() and part.numel() > 1:
                    return _flip(part, 2, part.abs() == part.abs().max())


class Generator(Callback):
    """Gives each rank generators of another seed."""

    def on_start(self, trainer: Trainer) -> None:
        torch.seed()


class Weight(Callback):
    """Takes back the first update of a weight, on each rank."""

    def on_start(self, trainer: Trainer) -> None:
        parts = (local(plain(one)) for one in trainer.parts.model.parameters() if one.requires_grad)
        self._part = next(part.detach() for part in parts if part.numel())
        self._before = self._part.clone()
        self._first = trainer.step + 1

    def on_step_end(self, trainer: Trainer, result: StepResult) -> None:
        if trainer.step == self._first:
            self._part.copy_(self._before)


class Rounding(Callback):
    """Flips the last bit of each first weight."""

    def on_start(self, trainer: Trainer) -> None:
        for weight in trainer.parts.model.parameters():
            part = local(plain(weight)).detach()
            _flip(part, 4, torch.ones_like(part, dtype=torch.bool))


def _flip(part: torch.Tensor, size: int, chosen: torch.Tensor) -> None:
    """Flip a bit of the chosen numbers, in place: the last one of the first `size` bytes."""
    width = part.element_size()
    bits = part.view(getattr(torch, f"int{8 * width}"))
    bits.bitwise_xor_(chosen.to(bits.dtype) << 8 * (width - min(size, width)))
