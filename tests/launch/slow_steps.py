"""A callback that gives a test time to disturb a run."""

from __future__ import annotations

import os
import time
from typing import Any

from titanlite import Callback


class SlowSteps(Callback):
    """Waits in each step of the job's first start, but for the first ones."""

    def on_step_end(self, trainer: Any, result: Any) -> None:
        if "SLURM_RESTART_COUNT" not in os.environ and trainer.step > 2:
            time.sleep(float(os.environ.get("STEP_SECONDS", "1.5")))
