"""The small callbacks of every run: watchdog, timeouts, compilation, attempts, resume check,
documents, garbage.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from titanlite import exit_codes
from titanlite.callbacks import SLOW_PHASES, Callback, RunEnd
from titanlite.checkpoint.loaded import RESUME, LoadedState
from titanlite.checkpoint.paths import AnyPath
from titanlite.checkpoint.resume_check import ResumeCheck
from titanlite.config.toml import TOMLDecodeError, loads
from titanlite.data.rows import Rows
from titanlite.data.skip_ranges import Range, ranges_of_steps, take
from titanlite.metrics.jsonl import MetricsLog
from titanlite.parallel.compile import CompileWatch
from titanlite.parallel.dist_env import patience, set_timeouts
from titanlite.runs import record
from titanlite.utils import counted, logger

if TYPE_CHECKING:
    from titanlite.data.token_checks import HashCheck
    from titanlite.metrics.watchdog import HangWatchdog
    from titanlite.step import StepResult
    from titanlite.trainer import Trainer


class Watchdog(Callback):
    """Tells the hang watchdog what this rank does.

    entered: the caller has entered it, and leaves it.
    """

    def __init__(self, watch: HangWatchdog, entered: bool) -> None:
        self.watch, self._entered = watch, entered

    def on_start(self, trainer: Trainer) -> None:
        if not self._entered:
            self.watch.__enter__()

    def on_phase(self, trainer: Trainer, phase: str) -> None:
        self.watch.phase(phase, trainer.step if phase == "data" else None)

    def on_end(self, trainer: Trainer, end: RunEnd) -> None:
        """First of all callbacks: the other ranks wait for this one."""
        if end.error is not None:
            end.reason = self.watch.failed(end.error) or end.reason
        self.watch.ending(
            end.error, lambda: trainer.callbacks.ending or "the end of the run's threads"
        )
        if not self._entered:
            self.watch.__exit__(None if end.error is None else type(end.error), end.error, None)


class TokenHashes(Callback):
    """Ends a run whose prepared tokens are found to be damaged. checks: of its texts.

    A save waits up to `PATIENCE` seconds for the parts that are read and not yet checked, unless
    the run is asked to stop. What is found later ends the run, too, and the error says since when
    the part was read.
    """

    #: Seconds.
    PATIENCE = 30.0

    def __init__(self, checks: Sequence[HashCheck]) -> None:
        self._checks = checks

    def on_phase(self, trainer: Trainer, phase: str) -> None:
        if phase == "save":
            self._settle(
                0.0 if trainer.stop.requested else self.PATIENCE,
                "this checkpoint is saved meanwhile",
            )

    def on_step_end(self, trainer: Trainer, result: StepResult) -> None:
        for check in self._checks:
            check.raise_found()

    def on_end(self, trainer: Trainer, end: RunEnd) -> None:
        if end.state == "done":
            self._settle(self.PATIENCE, "the run ends before that")

    def _settle(self, seconds: float, then: str) -> None:
        deadline = time.monotonic() + seconds
        left = sum(check.settle(max(deadline - time.monotonic(), 0.0)) for check in self._checks)
        if left:
            logger.warning(
                f"the hashes of {counted(left, 'parts')} of prepared tokens are still being "
                f"checked; {then}"
            )


class Timeouts(Callback):
    """Sets the timeouts of collectives, in seconds: of the first step and slow phases, and of all
    else.

    A slow phase must end on all ranks together.
    """

    def __init__(self, first: int, later: int) -> None:
        self._first, self._later = first, later
        self._lowered = False
        self._slow = contextlib.ExitStack()
        self._is_slow = False

    def on_phase(self, trainer: Trainer, phase: str) -> None:
        slow = self._lowered and phase in SLOW_PHASES
        if slow and not self._is_slow:
            self._slow.enter_context(patience(self._first, self._later))
        elif self._is_slow and not slow:
            self._slow.close()
        self._is_slow = slow

    def on_step_end(self, trainer: Trainer, result: StepResult) -> None:
        if not self._lowered:
            self._lowered = True
            set_timeouts(self._later)


class CompileReport(Callback):
    """Reports what `torch.compile` compiles, and what it compiles again."""

    def __init__(self, watch: CompileWatch) -> None:
        self._watch = watch

    def on_start(self, trainer: Trainer) -> None:
        if trainer.step < trainer.steps:
            self._watch.start()

    def on_step_end(self, trainer: Trainer, result: StepResult) -> None:
        self._watch.after(trainer.step, "training")

    def on_validation_end(self, trainer: Trainer, loss: float, tokens: int, seconds: float) -> None:
        self._watch.after(trainer.step, "validation")


class AttemptRecord(Callback):
    """Records on rank 0 that an attempt starts, what it saves and how it ends
    (`titanlite.runs.record`).

    toml: the resolved config. watch: when another rank has raised, it ends this process, and
    records that first.
    """

    def __init__(
        self, folder: Path, toml: str, description: str, device: str, watch: HangWatchdog | None
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
        self._record: record.AttemptRecord | None = None

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
        self._record, self.lines = record.begin(self._folder, start)

    def on_save(self, trainer: Trainer, step: int, folder: AnyPath, seconds: float) -> None:
        if self._record:
            self._record.saved(step, self._tokens_at(trainer, step))

    def on_rollback(self, trainer: Trainer) -> None:
        if self._record:
            self._record.saved(
                trainer.step, trainer.tokens_seen
            )  # what is kept, should the run end now

    def on_end(self, trainer: Trainer, end: RunEnd) -> None:
        """Record the end. The first call counts: the watchdog may call it before the
        trainer does.
        """
        if self._record:
            code = exit_codes.DONE if end.error is None else exit_codes.code_of(end.error)
            self._record.end(
                end.state, end.step, self._tokens_at(trainer, end.step), code, end.reason
            )

    def _tokens_at(self, trainer: Trainer, step: int) -> int:
        """Tokens seen when `step` was done."""
        return trainer.tokens_seen - (trainer.done - step) * trainer.parts.tokens_per_step


class VerifyResume(Callback):
    """Checks that a resumed run goes on as the attempt before did: the next batch, and the next
    step's figures.

    skip: ranges of sequences that this run skips. share: data-parallel rank and degree.
    """

    def __init__(self, check: ResumeCheck, skip: tuple[Range, ...], share: tuple[int, int]) -> None:
        self._check, self._skip, self._share = check, skip, share

    def on_start(self, trainer: Trainer) -> None:
        loaded = trainer.loaded
        if loaded is not None and loaded.origin == "resume":
            loaded, next_batch = self._with_other_skips(loaded, trainer), self._next_batch(trainer)
            if next_batch != loaded.train.get(RESUME, {}).get("next_batch"):
                loaded = _with_other_shares(loaded, trainer)
            self._check.resumed(loaded, next_batch)

    def on_step_end(self, trainer: Trainer, result: StepResult) -> None:
        if (
            found := self._check.after_step(trainer.step, result.loss, result.grad_norm)
        ) is not None:
            logger.log(logging.INFO if found.verified else logging.WARNING, found.text)

    def on_rollback(self, trainer: Trainer) -> None:
        self._check.forget()

    def on_end(self, trainer: Trainer, end: RunEnd) -> None:
        if end.state in ("done", "preempted"):
            self._check.flush()

    def state_dict(self, trainer: Trainer) -> dict[str, Any]:
        return self._check.at_save(trainer.step, self._next_batch(trainer))

    def _next_batch(self, trainer: Trainer) -> str | None:
        """Return the hash of the next global batch, the same on any number of ranks; None where the
        data end.

        All ranks call it together, each hashes its own sequences.
        """
        from titanlite.data.hashes import add_hashes, step_hash

        parts, (rank, degree) = trainer.parts, self._share
        first = parts.loader.state_dict()["next_sequence"]
        part: str | None = None
        try:
            part = step_hash(
                parts.datasets.train, first, parts.global_batch_size, rank, degree, self._skip
            )
        except (
            Exception
        ) as error:  # the step itself raises it again; a save is complete without the hash
            logger.warning(
                f"the next batch cannot be hashed, so a resume will not compare it: {error}"
            )
        found: list[tuple[int, str | None]] = [(0, None)] * parts.world.size
        dist.all_gather_object(found, (rank, part))
        whole = [part for part in dict(found).values() if part is not None]
        return add_hashes(whole) if len(whole) == degree else None

    def _with_other_skips(self, loaded: LoadedState, trainer: Trainer) -> LoadedState:
        """Return it with `data.skip_steps` among its changes if the next batch is another one for
        that.

        That key may be changed for a resume.
        """
        size = trainer.parts.global_batch_size
        try:
            before = ranges_of_steps(
                loads(loaded.config["toml"])["data"].get("skip_steps", []), size
            )
        except (TOMLDecodeError, KeyError, ValueError):
            return loaded
        first = loaded.train["data"]["next_sequence"]
        same = take(first, size, before) == take(first, size, self._skip)
        return loaded if same else replace(loaded, changes=(*loaded.changes, "data.skip_steps"))


def _with_other_shares(loaded: LoadedState, trainer: Trainer) -> LoadedState:
    """Return it with the mixture among its changes if sources have other shares, as a resume may
    give them.
    """
    mixture = trainer.parts.datasets.train.mixture
    if mixture is None or not mixture.changed:
        return loaded
    return replace(loaded, changes=(*loaded.changes, "data.source and data.phase"))


class DocumentLog(Callback):
    """Writes the documents of each step's batch to a file of JSON lines. Needs no collective.

    path: None on a rank that writes none. source: name of text that is no mixture. share:
    data-parallel rank and degree, of a rank that writes its own part; None: all of the batch.
    """

    def __init__(
        self,
        path: Path | None,
        dataset: Rows,
        source: str,
        global_batch: int,
        share: tuple[int, int] | None,
    ) -> None:
        self._log = None if path is None else MetricsLog(path)
        self._dataset, self._source, self._global_batch, self._share = (
            dataset,
            source,
            global_batch,
            share or (0, 1),
        )

    def on_start(self, trainer: Trainer) -> None:
        """Go on after the last step of the checkpoint, or begin anew. Rank 0 does so for
        all ranks.
        """
        if self._log is not None:
            folder = self._log.path.parent
            folder.mkdir(parents=True, exist_ok=True)
            others = folder.glob("documents-rank_*.jsonl") if trainer.parts.world.rank == 0 else ()
            for path in (self._log.path, *others):
                MetricsLog(path).truncate_after(trainer.step)

    def on_rollback(self, trainer: Trainer) -> None:
        self.on_start(trainer)

    def on_step_end(self, trainer: Trainer, result: StepResult) -> None:
        if self._log is None:
            return
        from titanlite.data.documents import documents_of

        sequences = trainer.recent[trainer.step].sequences(self._global_batch)
        rank, degree = self._share
        total = self._dataset.total_sequences
        found = {
            str(index): [
                document._asdict() for document in documents_of(self._dataset, index, self._source)
            ]
            for index in sequences[(rank - sequences[0]) % degree :: degree]
            if total is None or index < total
        }
        self._log.write({"step": trainer.step, "sequences": found})


class GarbageCollection(Callback):
    """Collects every `every` steps on all ranks; otherwise the pause of one rank makes all others
    wait.
    """

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
