"""Callbacks of runs in sweeps: one gives a test time to disturb them, one breaks them."""

from __future__ import annotations

import os
import time
from typing import Any

from titanlite import Callback


class SlowSteps(Callback):
    """Waits in the steps from 3 on, for as long as the environment says."""

    def on_step_end(self, trainer: Any, result: Any) -> None:
        if trainer.step > 2:
            time.sleep(float(os.environ.get("STEP_SECONDS", "0")))


class Breaks(Callback):
    """Raises in step 3."""

    def on_step_end(self, trainer: Any, result: Any) -> None:
        if trainer.step == 3:
            raise ValueError("this callback breaks")
