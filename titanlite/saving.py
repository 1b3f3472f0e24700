"""Saves of a run: what is written with the tensors, and what became of each save."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from titanlite.checkpoint import Checkpointer, CheckpointError
from titanlite.observe.console import logger
from titanlite.observe.stepline import human_time
from titanlite.preempt import GracefulStop

#: What else wants to know of a checkpoint that is there: step, tokens seen, folder, seconds that it took.
SavedHook = Callable[[int, int, Path, float], None]


class Saves:
    """The saves of one run, in the foreground or the background. All ranks call it alike.

    on_saved: called for each checkpoint that is there; with saves in the background on rank 0 only.
    """

    def __init__(self, checkpointer: Checkpointer, on_saved: SavedHook) -> None:
        self.checkpointer = checkpointer
        self._on_saved = on_saved
        #: Step of the newest checkpoint that is surely there.
        self.newest: int | None = None
        #: Tokens seen at the step of each save that is under way in the background.
        self._under_way: dict[int, int] = {}

    def save(
        self,
        step: int,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        state: dict[str, Any],
        *,
        stop: GracefulStop,
        final: bool,
        must: bool,
    ) -> bool:
        """Write the checkpoint of `step`; returns whether a rank was asked to stop while it was written.

        state: of the loop, JSON-able, with its "tokens_seen". final: nothing is trained after it, so a save in the
        background is waited for. must: raise CheckpointError when it fails; otherwise it is an error on the console,
        and training goes on.
        """
        started = time.perf_counter()
        stopping = False
        try:
            self._under_way[step] = state["tokens_seen"]
            folder = self.checkpointer.save(step, model, optimizer, state)
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
        if not self.checkpointer.in_background:
            self._note(step, folder, time.perf_counter() - started)
            return stopping
        if final or stopping:
            self.newest = step  # all ranks have waited for it; the others have no news of their own
        else:
            logger.info(f"checkpoint of step {step} copied in {human_time(copied)}, now it is being written")
        self.tell()
        return stopping

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
        if self.checkpointer.in_background:
            with contextlib.suppress(CheckpointError):
                self.checkpointer.wait()
            self.tell()

    def _note(self, step: int, folder: Path, seconds: float) -> None:
        self.newest = step
        self._on_saved(step, self._under_way.pop(step), folder, seconds)
