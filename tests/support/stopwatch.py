"""`train.py` with a stop-watch of its own around what the loop does, in the file watch.jsonl of the
run's folder: a line for each thing that is done, at once.

Each thing is made longer, so that its time is larger than what surrounds it.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any, NoReturn

from titanlite import main as entry

#: Seconds that each thing is made longer.
STEP = 0.25
FIRST_STEP = 0.6
DATA = 0.1
SAVE = 0.3
VALIDATION = 0.25


def main() -> NoReturn:
    from titanlite import trainer
    from titanlite.checkpoint.manager import Checkpointer
    from titanlite.step import TrainStep
    from titanlite.validation import ValidationSet

    (folder,) = (
        word.partition("=")[2] for word in sys.argv if word.startswith("--job.dump_folder=")
    )
    steps = 0

    def note(what: str, seconds: float, step: int | None = None) -> None:
        if os.environ["RANK"] == "0":
            row = {"what": what, "step": step, "seconds": seconds, "time": time.time()}
            with open(f"{folder}/watch.jsonl", "a") as file:
                file.write(json.dumps(row) + "\n")

    def step_seconds() -> float:
        nonlocal steps
        steps += 1
        return STEP + (FIRST_STEP if steps == 1 else 0.0)

    def timed(owner: Any, name: str, what: str, longer: Callable[[], float]) -> None:
        original = getattr(owner, name)

        def wrapped(self: Any, *arguments: Any, **options: Any) -> Any:
            began = time.perf_counter()
            found = original(self, *arguments, **options)
            time.sleep(longer())
            number = arguments[1] if what == "step" else None
            note(what, time.perf_counter() - began, number)
            return found

        setattr(owner, name, wrapped)

    note("start", 0.0)
    timed(TrainStep, "__call__", "step", step_seconds)
    timed(trainer, "to_device", "data", lambda: DATA)
    timed(Checkpointer, "save", "save", lambda: SAVE)
    timed(ValidationSet, "measure", "validation", lambda: VALIDATION)
    entry.main()
