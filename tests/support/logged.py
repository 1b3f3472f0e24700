"""`train.py` that logs a hash of this rank's batch in each step, to the file batches.RANK in the
folder of the run.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from typing import Any, NoReturn

from tests.support.faults import before_steps
from titanlite import main as entry
from titanlite.data.batch_hash import batch_hash


def main() -> NoReturn:
    (folder,) = (
        word.partition("=")[2] for word in sys.argv if word.startswith("--job.dump_folder=")
    )

    def log(step: int, _: Any, batches: Any) -> None:
        with (
            contextlib.suppress(OSError),
            open(f"{folder}/batches.{os.environ['RANK']}", "a") as file,
        ):
            file.write(json.dumps({"step": step, "batch": batch_hash(batches)}) + "\n")

    before_steps(log)
    entry.main()
