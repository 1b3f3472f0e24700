"""How the loop writes a checkpoint: what it holds besides tensors, and how its end is told.

A run without checkpoints does not import this.
"""

from __future__ import annotations

import contextlib
import logging
import time
from typing import TYPE_CHECKING, Any

from titanlite.checkpoint.errors import CheckpointError
from titanlite.checkpoint.loaded import LEFT_OUT
from titanlite.data import file_stamps
from titanlite.data.loader import gather_state
from titanlite.dist.dist_env import log_once
from titanlite.utils import human_time, logger

if TYPE_CHECKING:
    from titanlite.checkpoint.manager import Checkpointer
    from titanlite.trainer import Trainer


def write_checkpoint(trainer: Trainer, saver: Checkpointer) -> None:
    """Write a checkpoint now; the last one of a run is complete when this returns."""
    parts = trainer.parts
    last_step = trainer.step == trainer.steps
    last = last_step or trainer.stopping
    weights_only = None
    if last_step and not trainer.owed and parts.run.checkpoint.model_weights_only:
        weights_only = parts.run.checkpoint.export_dtype
    validation_loss = None
    if trainer.validated is not None and trainer.validated[0] == trainer.step:
        validation_loss = trainer.validated[1].all.loss
    started = time.perf_counter()
    try:
        folder = saver.save(
            trainer.step,
            parts.model,
            parts.optimizer,
            train_state(trainer),
            weights_only=weights_only,
            validation_loss=validation_loss,
            trackers=parts.trackers(),
            proven=trainer.good_steps > 0,
        )
        if not last:  # a stop that came while it was written needs no second save
            last = trainer.stopping = trainer.stop.requested_anywhere()
        stood = time.perf_counter() - started
        if last:
            saver.wait()
    except CheckpointError as error:
        if last_step:
            raise
        log_once(logging.ERROR, _failed(trainer.step, error))
        return
    if not saver.is_async:
        trainer.saved_step = trainer.step
        trainer.callbacks("on_save", trainer, trainer.step, folder, stood)
    elif last:
        # All ranks have waited for it; rank 0 alone gets its outcome.
        trainer.saved_step = trainer.step
    else:
        logger.info(
            f"checkpoint of step {trainer.step} is being written; no step for {human_time(stood)}"
        )


def report_saves(trainer: Trainer, saver: Checkpointer, wait: bool) -> None:
    """Report as `Trainer.poll_saves` does."""
    if wait and saver.is_async:
        with contextlib.suppress(CheckpointError):
            saver.wait()
    while (outcome := saver.poll()) is not None:
        if outcome.problem:
            logger.error(_failed(outcome.step, outcome.problem))
        else:
            trainer.saved_step = outcome.step
            trainer.callbacks("on_save", trainer, outcome.step, outcome.folder, outcome.seconds)


def _failed(step: int, problem: object) -> str:
    return (
        f"step {step}: NO CHECKPOINT WAS WRITTEN: {problem}. Training continues; tried again later"
    )


def train_state(trainer: Trainer) -> dict[str, Any]:
    """Return what a checkpoint holds besides tensors. All ranks call it together."""
    parts = trainer.parts
    state = {
        "data": gather_state(parts.loader.state_dict(), parts.datasets.train),
        "tokens_seen": trainer.tokens_seen,
        "epoch_tokens": {
            name: text.tokens_per_epoch for name, text in parts.datasets.train.texts().items()
        },
        "global_batch": parts.course.size(trainer.step).sequences,
        "schedule_began": parts.learning_rate.began,
        "schedule": parts.learning_rate.record(),
        LEFT_OUT: list(parts.run.checkpoint.exclude_from_loading),
    }
    files = file_stamps.record(parts.datasets.train)
    if files:
        state[file_stamps.TEXT_FILES] = files
    if parts.learning_rate.began_tokens:
        state["schedule_began_tokens"] = parts.learning_rate.began_tokens
    statistics = parts.train_step.guard.state_dict()
    if statistics:
        state["guard"] = statistics
    for name in trainer.owed:
        state[f"{name}_owed"] = True
    trainer.callbacks.add_state(trainer, state)
    return state
