"""Python's garbage collection: on all ranks in the same steps, and timed."""

from __future__ import annotations

import gc
import time
from typing import TYPE_CHECKING, Any

from titanlite.callbacks import Callback, RunEnd

if TYPE_CHECKING:
    from titanlite.step import StepResult
    from titanlite.trainer import Trainer


class GarbageCollection(Callback):
    """Collects every `every` steps on all ranks; otherwise the pause of one rank makes all others wait."""

    def __init__(self, every: int) -> None:
        self._every = every
        self._enabled = False
        self._seconds = self._began = 0.0

    def read(self) -> float:
        """Return the seconds that collections took since the last call."""
        seconds, self._seconds = self._seconds, 0.0
        return seconds

    def on_start(self, trainer: Trainer) -> None:
        gc.collect()  # before any time is measured
        self._enabled = gc.isenabled()
        gc.disable()
        gc.callbacks.append(self._note)

    def on_step_end(self, trainer: Trainer, result: StepResult) -> None:
        if trainer.step % self._every == 0:
            gc.collect(1)

    def on_end(self, trainer: Trainer, end: RunEnd) -> None:
        if self._note in gc.callbacks:
            gc.callbacks.remove(self._note)
        if self._enabled:
            gc.enable()

    def _note(self, phase: str, _: dict[str, Any]) -> None:
        if phase == "start":
            self._began = time.perf_counter()
        else:
            self._seconds += time.perf_counter() - self._began
