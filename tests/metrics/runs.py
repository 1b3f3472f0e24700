"""Stand-ins for the trainer, where a callback asks for little of it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

#: Stands in for what a callback does not read.
ANY: Any = None


def at_step(step: int) -> Any:
    """What a callback that only asks for the step needs of a trainer."""
    return SimpleNamespace(step=step, phase=lambda _: None)
