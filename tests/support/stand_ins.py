"""Stand-ins for the trainer, where a callback asks for little of it; and work for the processor."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

#: Stands in for what a callback does not read.
ANY: Any = None


def at_step(step: int) -> Any:
    """What a callback that only asks for the step needs of a trainer."""
    return SimpleNamespace(step=step, phase=lambda _: None)


def burn(seconds: float) -> None:
    """Keep the processor busy for so long."""
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass
