"""A callback that gives a test time to disturb a run."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
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


class HeldSave(Callback):
    """Holds the save of step `HELD_SAVE` on the second machine, once. The file `held` of the run
    folder says when.
    """

    def on_start(self, trainer: Any) -> None:
        if os.environ["SLURM_NODEID"] == "1":
            sys.addaudithook(self._hold)

    def _hold(self, event: str, values: tuple[Any, ...]) -> None:
        shard = f"/step-{os.environ['HELD_SAVE']}/"
        if event != "open" or shard not in str(values[0]):
            return
        held = Path(os.environ["RUN"]) / "held"
        if not held.exists():
            held.touch()
            time.sleep(600)
