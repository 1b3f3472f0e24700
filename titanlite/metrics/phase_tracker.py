"""The step and phase that a rank is in."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any


class Position:
    """Notes step and phase of a rank. It watches nothing: nobody waits for a rank alone.

    Attributes:
        verdict: the sentence that names the rank at fault, once there is one.
        on_peer: called with the error of another rank before this one ends.
    """

    def __init__(self) -> None:
        self.verdict = ""
        self.on_peer: Callable[[Any], None] | None = None
        #: Step, number of the phase in it, phase, and when it began.
        self._now = (0, 0, "start", time.monotonic())

    def phase(self, name: str, step: int | None = None) -> None:
        """Note that this rank begins a phase: data, forward, backward, ...

        All ranks call it in the same order. Costs about half a microsecond. step: number of a step
        that begins.
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

    @property
    def where(self) -> str:
        step, _, phase, _ = self._now
        return f"{phase} of step {step}" if step else phase

    def __enter__(self) -> Any:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """A rank alone tells nobody."""
