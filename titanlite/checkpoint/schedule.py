"""After which steps a run saves: the same answer on all ranks. No torch here."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from titanlite.config.sections import Checkpoint
    from titanlite.dist.dist_env import DistEnv
    from titanlite.trainer import Trainer

#: How often in an interval rank 0 tells the others the time, about.
_SYNCS = 32


class SaveSchedule:
    """Says after which steps to save: the same answer on all ranks, which make one together and ask
    alike.

    Call `due` after each step, and `begin` before a save. An interval in steps needs no
    communication. For one in seconds the clock of rank 0 decides, by a small broadcast on the hosts
    that waits for no device. The ranks ask it after every step, then more seldom: a save is late by
    a thirty-second of the interval's steps at most. The first interval begins with the first
    question.

    clock: seconds, for tests.
    """

    def __init__(
        self, config: Checkpoint, world: DistEnv, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.config = config
        self._world = world
        self._clock = clock
        #: Step and time at the start of the interval; None before the first question.
        self._begun: tuple[int, float] | None = None
        #: The latest step in question, and the one after which rank 0 is asked next.
        self._asked = 0
        self._next_sync = 0

    def due(self, step: int) -> bool:
        """Return whether to save after `step`."""
        config = self.config
        if self._begun is None:
            self.begin(step)
        elif step <= self._asked:
            # The run was rolled back to an earlier step.
            self._next_sync = step
        self._asked = step
        is_first = config.enable_first_step_checkpoint and step == 1
        if is_first or config.is_milestone(step):
            return True
        if config.interval_type == "steps":
            return step % config.interval == 0
        if self._begun is None or step < self._next_sync:
            return False
        first, begun = self._begun
        self._next_sync = step + max((step - first) // _SYNCS, 1)
        return self._world.broadcast(self._clock() - begun >= config.interval)

    def between(self, trainer: Trainer) -> None:
        """Do what is due after a step without a save: nothing here. All ranks call it together."""

    def begin(self, step: int) -> None:
        """Start the next interval: a save of `step` begins, whether it succeeds or not."""
        self._begun = (step, self._clock())
        self._next_sync = step + 1
