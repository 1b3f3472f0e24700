"""After which steps a run saves: the same answer on all ranks. No torch here."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, cast

from titanlite.checkpoint.manifest import (
    CheckpointError,
    Manifest,
    parse_manifest,
    step_folder,
    steps_in,
)
from titanlite.checkpoint.store_paths import to_path

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

    fingerprints: of the run, whose validation losses are those to beat. clock: seconds, for tests.
    held_out: hash of the held-out text; losses on another one are not compared.
    """

    def __init__(
        self,
        config: Checkpoint,
        world: DistEnv,
        fingerprints: dict[str, str] | None = None,
        clock: Callable[[], float] = time.monotonic,
        held_out: str = "",
    ) -> None:
        self.config = config
        self._held_out = held_out
        self._world = world
        self._fingerprints = fingerprints
        self._clock = clock
        #: Step and time at the start of the interval; None before the first question.
        self._begun: tuple[int, float] | None = None
        #: The latest step in question, and the one after which rank 0 is asked next.
        self._asked = 0
        self._next_sync = 0

    def due(self, step: int, validation_loss: float | None = None) -> bool:
        """Return whether to save after `step`. validation_loss: of these weights, if just
        measured.
        """
        config = self.config
        if self._begun is None:
            self.begin(step)
        elif step <= self._asked:
            # The run was rolled back to an earlier step.
            self._next_sync = step
        self._asked = step
        if self._is_step_of_config(step):
            return True
        judged = config.keep_best > 0 and validation_loss is not None
        syncs = config.interval_type == "seconds" and step >= self._next_sync
        if not (judged or syncs):
            return False
        first, begun = cast("tuple[int, float]", self._begun)
        if syncs:
            self._next_sync = step + max((step - first) // _SYNCS, 1)
        answer = False
        if self._world.rank == 0:
            is_over = syncs and self._clock() - begun >= config.interval
            answer = is_over or (judged and self._is_among_best(validation_loss))
        return self._world.broadcast(answer)

    def _is_step_of_config(self, step: int) -> bool:
        config = self.config
        if config.interval_type == "steps" and step % config.interval == 0:
            return True
        is_first = config.enable_first_step_checkpoint and step == 1
        return is_first or config.is_milestone(step)

    def between(self, trainer: Trainer) -> None:
        """Do what is due after a step without a save: nothing here. All ranks call it together."""

    def begin(self, step: int) -> None:
        """Start the next interval: a save of `step` begins, whether it succeeds or not."""
        self._begun = (step, self._clock())
        self._next_sync = step + 1

    def _compares(self, manifest: Manifest) -> bool:
        if manifest.validation_loss is None or not manifest.can_be_resumed_by(self._fingerprints):
            return False
        return manifest.held_out == self._held_out

    def _is_among_best(self, loss: float | None) -> bool:
        if loss is None or not math.isfinite(loss):
            return False
        root = to_path(self.config.folder)
        as_low = 0
        try:
            for step in steps_in(root):
                with suppress(CheckpointError):
                    manifest = parse_manifest(step_folder(root, step))
                    if self._compares(manifest) and cast("float", manifest.validation_loss) <= loss:
                        as_low += 1
        except OSError:
            # The folder cannot be read: the save will say why.
            return True
        return as_low < self.config.keep_best
