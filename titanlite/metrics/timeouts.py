"""Timeouts of collectives in a run of several ranks."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING

from titanlite.callbacks import SLOW_PHASES, Callback
from titanlite.dist.dist_env import set_timeout
from titanlite.metrics.housekeeping import has_new_size

if TYPE_CHECKING:
    from titanlite.step import StepResult
    from titanlite.trainer import Trainer


def set_timeouts(seconds: float) -> None:
    """Set the collective timeout of every group of this process.

    The first step may compile for minutes. After it, a stuck peer should be found soon.
    """
    import torch.distributed as dist

    dist.barrier()  # a fast rank must not time out one that is still in the slow phase
    set_timeout(timedelta(seconds=seconds))


@contextmanager
def patience(seconds: float, usual: float) -> Iterator[None]:
    """Let collectives take `seconds` inside (a save to a slow disk), and `usual` seconds
    afterwards.

    All ranks must leave it together.
    """
    set_timeout(timedelta(seconds=seconds))
    try:
        yield
    finally:
        set_timeout(timedelta(seconds=usual))


class Timeouts(Callback):
    """Sets the timeouts of collectives, in seconds: of the first step and slow phases, and of all
    else.

    A slow phase must end on all ranks together.
    """

    def __init__(self, first: int, later: int) -> None:
        self._first = first
        self._later = later
        self._lowered = False
        self._slow = contextlib.ExitStack()
        self._is_slow = False

    def on_phase(self, trainer: Trainer, phase: str) -> None:
        slow = self._lowered and (phase in SLOW_PHASES or has_new_size(trainer))
        if slow and not self._is_slow:
            self._slow.enter_context(patience(self._first, self._later))
        elif self._is_slow and not slow:
            self._slow.close()
        self._is_slow = slow

    def on_step_end(self, trainer: Trainer, result: StepResult) -> None:
        if not self._lowered:
            self._lowered = True
            set_timeouts(self._later)
