"""A callback that gives a test time to disturb a run."""

from __future__ import annotations

import time
from typing import Any

from titanlite import Callback


class SlowSteps(Callback):
    """Waits in each step."""

    def on_step_end(self, trainer: Any, result: Any) -> None:
        time.sleep(1.0)
