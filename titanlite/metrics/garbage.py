"""How long garbage collection halts a process."""

from __future__ import annotations

import gc
import time
from typing import Any


class GarbageClock:
    """Adds up the time that Python's collector takes, whoever calls it, from `start` to `close`."""

    def __init__(self) -> None:
        self._seconds = 0.0
        self._began: float | None = None

    def start(self) -> None:
        """Begin to listen."""
        gc.callbacks.append(self._note)

    def read(self) -> float:
        """Seconds since the last reading."""
        seconds, self._seconds = self._seconds, 0.0
        return seconds

    def close(self) -> None:
        """Stop listening."""
        if self._note in gc.callbacks:
            gc.callbacks.remove(self._note)

    def _note(self, phase: str, _: dict[str, Any]) -> None:
        if phase == "start":
            self._began = time.perf_counter()
        elif self._began is not None:
            self._seconds += time.perf_counter() - self._began
            self._began = None
