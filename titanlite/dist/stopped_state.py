"""How a run stands that was asked to stop, and has."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from titanlite.dist.dist_env import log_once
from titanlite.dist.signals import StopRequested

if TYPE_CHECKING:
    from titanlite.trainer import Trainer


def stopped(trainer: Trainer) -> StopRequested:
    """Return and log how the run stands. All ranks call it together."""
    step, newest = trainer.step, trainer.saved_step
    saver = trainer.parts.checkpointer
    saved = step == 0 or newest == step
    if step == 0:
        kept = "no step was done, nothing is lost"
    elif saver is None:
        kept = "checkpoints are off, nothing is saved"
    elif saved:
        command = "the same command"
        # Both would be refused.
        if saver.config.load_step >= 0:
            command += " without checkpoint.load_step"
        if saver.config.start == "fresh":
            command += ' without checkpoint.start = "fresh"'
        kept = f"the checkpoint of step {step} is written, {command} continues from there"
    else:
        other = "there is no checkpoint" if newest is None else f"the newest is of step {newest}"
        kept = f"its checkpoint could not be written, {other}"
    reason = trainer.stop.describe()
    log_once(logging.WARNING, f"stopped after step {step} by {reason}: {kept}")
    return StopRequested(f"{reason}: {kept}", step, saved, together=True)
