"""A callback that gives a test time to disturb a run."""

from __future__ import annotations

import os
import time
from typing import Any

from titanlite import Callback


class SlowSteps(Callback):
    """Waits before the first step if the environment says so, and in each step of the job's first
    start, but for the first ones.
    """

    def on_start(self, trainer: Any) -> None:
        time.sleep(float(os.environ.get("START_SECONDS", "0")))  # a signal ends it

    def on_step_end(self, trainer: Any, result: Any) -> None:
        if "SLURM_RESTART_COUNT" not in os.environ and trainer.step > 2:
            time.sleep(float(os.environ.get("STEP_SECONDS", "1.5")))
