"""The callback that ends a run whose prepared tokens are damaged."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from titanlite.callbacks import Callback, RunEnd
from titanlite.utils import counted, logger

if TYPE_CHECKING:
    from titanlite.data.token_integrity import HashCheck
    from titanlite.step import StepResult
    from titanlite.trainer import Trainer


class TokenHashes(Callback):
    """Ends a run whose prepared tokens are found to be damaged.

    A save waits for parts that are read but not checked, unless the run is asked to stop.
    """

    #: Seconds that a save waits.
    PATIENCE = 30.0

    def __init__(self, checks: Sequence[HashCheck]) -> None:
        self._checks = checks

    def on_phase(self, trainer: Trainer, phase: str) -> None:
        if phase == "save":
            self._settle(
                0.0 if trainer.stop.requested else self.PATIENCE,
                "this checkpoint is saved meanwhile",
            )

    def on_step_end(self, trainer: Trainer, result: StepResult) -> None:
        for check in self._checks:
            check.raise_found()

    def on_end(self, trainer: Trainer, end: RunEnd) -> None:
        if end.state == "done":
            self._settle(self.PATIENCE, "the run ends before that")

    def _settle(self, seconds: float, then: str) -> None:
        deadline = time.monotonic() + seconds
        left = sum(check.settle(max(deadline - time.monotonic(), 0.0)) for check in self._checks)
        if left:
            logger.warning(
                f"the hashes of {counted(left, 'parts')} of prepared tokens are still being "
                f"checked; {then}"
            )
