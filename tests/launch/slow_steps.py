"""A callback that gives a test time to disturb a run."""

from __future__ import annotations

import os
import time
from typing import Any

from titanlite import Callback


class SlowSteps(Callback):
    """Waits in each step."""

    def on_step_end(self, trainer: Any, result: Any) -> None:
        time.sleep(float(os.environ.get("STEP_SECONDS", "1")))
