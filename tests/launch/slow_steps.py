"""A callback that gives a test time to disturb a run."""

from __future__ import annotations

import itertools
import os
import re
import sys
import time
from pathlib import Path
from typing import Any

from titanlite import Callback


class SlowSteps(Callback):
    """Waits in each step of the job's first start, but for the first ones."""

    def on_step_end(self, trainer: Any, result: Any) -> None:
        if "SLURM_RESTART_COUNT" not in os.environ and trainer.step > 2:
            time.sleep(float(os.environ.get("STEP_SECONDS", "0.5")))


class WrongNode(Callback):
    """Lets each pass on node n2 compute another gradient, from step 4 on."""

    def on_start(self, trainer: Any) -> None:
        noise = itertools.count(1)

        def wrong(gradient: Any) -> Any:
            return gradient * (next(noise) if trainer.step >= 4 else 1)

        def watch(module: Any, _: Any) -> None:
            module.weight.register_hook(wrong)

        if os.environ["SLURMD_NODENAME"] == "n2":
            module = trainer.parts.model.get_submodule("layers.1.feed_forward.w2")
            module.register_forward_pre_hook(watch)


class Held(Callback):
    """Holds the second machine once, until it is killed. The file `held` of the run folder says
    when.

    HELD_FILE is a pattern: it waits where a path that fits is opened. HELD_PHASE is as backward:7:
    in that phase of the step.
    """

    def on_start(self, trainer: Any) -> None:
        if os.environ["SLURM_NODEID"] == "1" and os.environ.get("HELD_FILE"):
            sys.addaudithook(self._open)

    def on_phase(self, trainer: Any, phase: str) -> None:
        wanted = os.environ.get("HELD_PHASE")
        if os.environ["SLURM_NODEID"] == "1" and f"{phase}:{trainer.step}" == wanted:
            self._hold()

    def _open(self, event: str, values: tuple[Any, ...]) -> None:
        if event == "open" and re.search(os.environ["HELD_FILE"], str(values[0])):
            self._hold()

    def _hold(self) -> None:
        held = Path(os.environ["RUN"]) / "held"
        if not held.exists():
            held.touch()
            time.sleep(600)
