"""Saves of a run: what is written with the tensors, and what became of each save."""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from titanlite.checkpoint import Checkpointer, CheckpointError
from titanlite.checkpoint.manifest import parse_manifest, step_folder, steps_in
from titanlite.checkpoint.paths import AnyPath, StoreError
from titanlite.checkpoint.schedule import SaveSchedule, grace_warning
from titanlite.metrics.startup_report import WARNING
from titanlite.parallel.world import World
from titanlite.preempt import GracefulStop, Preempted
from titanlite.utils import human_time, logger

#: What else wants to know of a checkpoint that is there: step, tokens seen, folder, seconds that it took.
SavedHook = Callable[[int, int, AnyPath, float], None]


class Saves:
    """The saves of one run, in the foreground or the background. All ranks call it alike.

    on_saved: called for each checkpoint that is there; with saves in the background on rank 0 only.
    """

    def __init__(self, checkpointer: Checkpointer, schedule: SaveSchedule, world: World, on_saved: SavedHook) -> None:
        self.checkpointer = checkpointer
        config = checkpointer.config
        #: Type of the weights in the last save, if that holds nothing else.
        self._weights_only = config.export_dtype if config.model_weights_only else None
        self._schedule = schedule
        self._world = world
        self._on_saved = on_saved
        #: Step and loss of the latest validation.
        self._validation: tuple[int, float] | None = None
        #: Whether it was said that a save takes too long for the grace period.
        self._warned = False
        #: Step of the newest checkpoint that is surely there.
        self.newest: int | None = None
        #: Step of the latest save that did not fail when it was begun, and of that which the run goes on from; alike on
        #: all ranks.
        self._begun: int | None = None
        self._loaded: int | None = None
        #: Tokens seen at the step of each save that is under way in the background.
        self._under_way: dict[int, int] = {}

    def warnings(self, steps: int) -> list[str]:
        """What to tell on rank 0 before a run of so many steps begins."""
        found = []
        if self._weights_only:
            found.append(
                f"the last save, of step {steps}, will hold the weights only, as {self._weights_only} "
                "(checkpoint.model_weights_only): to train on later means to go back to the full checkpoint before it"
            )
        if self._world.rank == 0 and (known := self._latest_seconds()) is not None:
            step, seconds = known
            told = self._grace(seconds, f"the save of step {step}, by an earlier attempt,")
            found += [f"{WARNING}{text}" for text in told]
        return found

    def _latest_seconds(self) -> tuple[int, float] | None:
        """Step and seconds of the newest save of a whole run's state; None where nothing tells."""
        with contextlib.suppress(StoreError):
            for step in reversed(steps_in(self.checkpointer.root)):
                with contextlib.suppress(CheckpointError):
                    manifest = parse_manifest(step_folder(self.checkpointer.root, step))
                    if not manifest.weights_only:
                        return None if manifest.seconds is None else (step, manifest.seconds)
        return None

    def _grace(self, seconds: float, what: str) -> list[str]:
        text = "" if self._warned else grace_warning(seconds, what, os.environ)
        self._warned = self._warned or bool(text)
        return [text] if text else []

    def validated(self, step: int, loss: float) -> None:
        """The validation loss of the weights after `step`; a save of them records it."""
        self._validation = step, loss

    def _loss_of(self, step: int) -> float | None:
        return self._validation[1] if self._validation and self._validation[0] == step else None

    def due(self, step: int) -> bool:
        """Whether to save after `step`; all ranks ask after every step."""
        return self._schedule.due(step, self._loss_of(step))

    def seed(self, model: nn.Module, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
        """Write the checkpoint of a run that has not begun, as step 0. Raises CheckpointError if there are others."""
        root = self.checkpointer.root
        if there := steps_in(root):
            raise CheckpointError(
                f"checkpoint.create_seed_checkpoint = true, but {root} holds step-{there[-1]} already: give another "
                "checkpoint.folder or job.dump_folder"
            )
        folder = self.checkpointer.save(0, model, optimizer, state)
        self.checkpointer.wait()
        logger.info(
            f"seed checkpoint written to {folder}: the same config without "
            "create_seed_checkpoint starts from it, on any number of ranks"
        )

    def save(
        self,
        step: int,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        state: dict[str, Any],
        *,
        trackers: Mapping[str, str],
        stop: GracefulStop,
        final: bool,
        must: bool,
        proven: bool = True,
    ) -> bool:
        """Write the checkpoint of `step`; returns whether a rank was asked to stop while it was written.

        state: of the loop, JSON-able, with its "tokens_seen". trackers: service → id of the run there. final: nothing
        is trained after it, so a save in the background is waited for. must: it is of the run's last step, and raises
        CheckpointError when it fails; otherwise that is an error on the console, and training goes on. proven: as in
        `Checkpointer.save`.
        """
        started = time.perf_counter()
        stopping = False
        self._schedule.begin(step)
        done = must and not state.get("validation_owed")  # else a run still goes on from it
        try:
            self._under_way[step] = state["tokens_seen"]
            folder = self.checkpointer.save(
                step,
                model,
                optimizer,
                state,
                weights_only=self._weights_only if done else None,
                validation_loss=self._loss_of(step),
                trackers=trackers,
                proven=proven,
            )
            self._begun = step
            if not final:
                stopping = stop.agreed()  # asked while it was written: it need not be written again
            copied = time.perf_counter() - started
            if final or stopping:
                self.checkpointer.wait()
        except CheckpointError as error:
            self._under_way.pop(step, None)
            if must:
                raise
            level = logging.INFO if dist.get_rank() else logging.ERROR  # on the console once, in every log of a rank
            told = f"step {step}: NO CHECKPOINT WAS WRITTEN: {error}. Training goes on; tried again later"
            logger.log(level, told)
            return stopping
        if not self.checkpointer.is_async:
            self._note(step, folder, time.perf_counter() - started)
            return stopping
        if final or stopping:
            self.newest = step  # all ranks have waited for it; the others have no news of their own
        else:
            logger.info(f"checkpoint of step {step} copied in {human_time(copied)}, now it is being written")
        self.tell()
        return stopping

    def stand_at(self, step: int) -> None:
        """The run goes on from its checkpoint of `step`."""
        self.newest = self._loaded = step
        self._begun = None

    def has(self, step: int) -> bool:
        """Whether there is a checkpoint of `step` already; one on its way is waited for. All ranks call it together."""
        if step == self._begun and self.checkpointer.is_async:
            try:
                self.checkpointer.wait()
            except CheckpointError:
                return False
            finally:
                self.tell()
            self.newest = step
        return step in (self._begun, self._loaded)

    def tell(self) -> None:
        """What became of saves in the background, on rank 0. A failed one is tried again with the next that is due."""
        while outcome := self.checkpointer.poll():
            if outcome.problem:
                self._under_way.pop(outcome.step, None)
                logger.error(
                    f"step {outcome.step}: NO CHECKPOINT WAS WRITTEN: {outcome.problem}. Training goes on; tried again "
                    "later"
                )
            else:
                self._note(outcome.step, outcome.folder, outcome.seconds)

    def wait(self) -> None:
        """Let a save in the background end, whatever comes of it. All ranks call it together."""
        if self.checkpointer.is_async:
            with contextlib.suppress(CheckpointError):
                self.checkpointer.wait()
            self.tell()

    def _note(self, step: int, folder: AnyPath, seconds: float) -> None:
        self.newest = step
        if self._world.rank == 0:
            for text in self._grace(seconds, f"the save of step {step}"):
                logger.warning(text)
        self._on_saved(step, self._under_way.pop(step), folder, seconds)


def preempted(saves: Saves | None, stop: GracefulStop, step: int) -> Preempted:
    """How a run stands that was asked to stop and has, after `step`. All ranks call it together."""
    saved, kept = _what_is_saved(saves, step)
    who = stop.who()
    level = logging.INFO if dist.get_rank() else logging.WARNING  # on the console once, in every log of a rank
    logger.log(level, f"stopped after step {step} by {who}: {kept}")
    return Preempted(f"{who}: {kept}", step, saved, together=True)


def _what_is_saved(saves: Saves | None, step: int) -> tuple[bool, str]:
    """Whether a checkpoint of `step` is there, and in words what is, for a run that stops after that step."""
    if step == 0:
        return True, "no step was done, nothing is lost"
    if saves is None:
        return False, "checkpoints are off, nothing is saved"
    if saves.newest == step:
        return True, f"the checkpoint of step {step} is written, the same command goes on from there"
    newest = "there is no checkpoint" if saves.newest is None else f"the newest is of step {saves.newest}"
    return False, f"its checkpoint could not be written, {newest}"
