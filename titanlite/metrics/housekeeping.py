"""The small callbacks of every run: watchdog, attempts, garbage."""

from __future__ import annotations

import gc
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from titanlite import exit_codes
from titanlite.callbacks import Callback, RunEnd
from titanlite.runs import record

if TYPE_CHECKING:
    from titanlite.checkpoint.store_paths import AnyPath
    from titanlite.metrics.phase_tracker import Position
    from titanlite.step import StepResult
    from titanlite.trainer import Trainer


def has_new_size(trainer: Trainer) -> bool:
    """Whether the step's size differs from the one before, so that it may compile again."""
    course = trainer.parts.course
    return course.size(trainer.step) != course.size(trainer.step - 1)


class Watchdog(Callback):
    """Tells the hang watchdog what this rank does. entered: the caller enters and leaves it."""

    def __init__(self, watch: Position, entered: bool) -> None:
        self.watch = watch
        self._entered = entered

    def on_start(self, trainer: Trainer) -> None:
        if not self._entered:
            self.watch.__enter__()

    def on_phase(self, trainer: Trainer, phase: str) -> None:
        if phase == "data" and has_new_size(trainer):
            self.watch.expect_warm_up(trainer.step)
        self.watch.phase(phase, trainer.step if phase == "data" else None)

    def on_end(self, trainer: Trainer, end: RunEnd) -> None:
        """First of all callbacks: the other ranks wait for this one."""
        if end.error is not None:
            end.reason = self.watch.failed(end.error) or end.reason
        self.watch.closing(end.error)
        if not self._entered:
            self.watch.__exit__(None if end.error is None else type(end.error), end.error, None)


class AttemptRecord(Callback):
    """Records on rank 0 that an attempt starts, saves and ends (`titanlite.runs.record`).

    toml: the resolved config. watch: when another rank has raised, it ends this process, and
    records that first.
    """

    def __init__(
        self, folder: Path, toml: str, description: str, device: str, watch: Position | None
    ) -> None:
        self._folder, self._toml, self._description, self._device = (
            folder,
            toml,
            description,
            device,
        )
        self._watch = watch
        #: Lines about the attempt before, for the start report.
        self.lines: list[str] = []
        self.record: record.AttemptRecord | None = None

    def on_start(self, trainer: Trainer) -> None:
        world = trainer.parts.world
        if world.rank:
            return
        if self._watch is not None:
            self._watch.on_peer = lambda error: self.on_end(
                trainer, RunEnd("failed", trainer.done, error, str(error))
            )
        loaded = trainer.loaded
        start = record.Start(
            config_toml=self._toml,
            steps=trainer.steps,
            ranks=world.size,
            device=self._device,
            description=self._description,
            step=trainer.step,
            tokens=trainer.tokens_seen,
            resumed=loaded is not None and loaded.origin == "resume",
            source=loaded.folder if loaded is not None and loaded.origin == "from" else None,
        )
        self.record, self.lines = record.begin(self._folder, start)

    def on_save(self, trainer: Trainer, step: int, folder: AnyPath, seconds: float) -> None:
        if self.record:
            self.record.saved(step, self._tokens_at(trainer, step))

    def on_rollback(self, trainer: Trainer) -> None:
        if self.record:
            self.record.saved(
                trainer.step, trainer.tokens_seen
            )  # what is kept, should the run end now

    def on_end(self, trainer: Trainer, end: RunEnd) -> None:
        """The first call counts: the watchdog may call it before the trainer does."""
        if self.record:
            code = exit_codes.DONE if end.error is None else exit_codes.code_of(end.error)
            self.record.end(
                end.state, end.step, self._tokens_at(trainer, end.step), code, end.reason
            )

    def _tokens_at(self, trainer: Trainer, step: int) -> int:
        later = range(step + 1, trainer.done + 1)
        return trainer.tokens_seen - sum(trainer.parts.course.size(one).tokens for one in later)


class GarbageCollection(Callback):
    """Collects every `every` steps on all ranks: the pause of one rank makes all others wait."""

    def __init__(self, every: int) -> None:
        self._every = every
        self._enabled = False
        self._seconds = self._began = 0.0

    def read(self) -> float:
        """Return the seconds that collections took since the last call."""
        seconds = self._seconds
        self._seconds = 0.0
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
