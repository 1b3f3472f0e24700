"""The step and phase that a rank is in."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

from titanlite import exit_codes
from titanlite.utils import logger


class Position:
    """Notes step and phase of a rank, and ends a rank that hangs after its last step.

    closing_seconds: how long callbacks and threads may take after the last step, before the process
    ends with an error; 0: as long as they want.
    """

    def __init__(self, closing_seconds: float = 0.0) -> None:
        self._closing_seconds = closing_seconds
        self._closing: threading.Timer | None = None
        #: The sentence that names the rank at fault.
        self.verdict = ""
        #: Gets the error of another rank before this one ends.
        self.on_peer: Callable[[Any], None] | None = None
        #: Step, number of the phase in it, phase, and when it began.
        self._now = (0, 0, "start", time.monotonic())

    def phase(self, name: str, step: int | None = None) -> None:
        """Note that this rank begins a phase: data, forward, backward, ...

        All ranks call it in the same order. step: number of a step that begins.
        """
        old, place, _, _ = self._now
        if step is None or step == old:
            self._now = (old, place + 1, name, time.monotonic())
        else:
            self._now = (step, 0, name, time.monotonic())

    def expect_warm_up(self, step: int) -> None:
        """Wait for a step as for the first one."""

    def failed(self, error: BaseException) -> str:
        """Report an exception to the other ranks, and return who is to blame."""
        return ""

    def closing(self, error: BaseException | None) -> None:
        """Note that only callbacks and threads have to end. error: that ended the run."""
        seconds = self._closing_seconds
        if not seconds:
            return
        code = exit_codes.ERROR if error is None else exit_codes.code_of(error)

        def end() -> None:
            logger.error(
                f"callbacks and threads have not ended in {seconds:.0f} s after the last step, so "
                "this process ends. Its checkpoints are complete. A higher "
                "comm.init_timeout_seconds gives more time"
            )
            exit_codes.exit_now(code)

        self._closing = threading.Timer(seconds, end)
        self._closing.daemon = True
        self._closing.start()

    @property
    def where(self) -> str:
        step, _, phase, _ = self._now
        return f"{phase} of step {step}" if step else phase

    def __enter__(self) -> Any:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Stop waiting for the end. A rank alone tells nobody."""
        if self._closing is not None:
            self._closing.cancel()
