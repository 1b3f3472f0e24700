"""Steps whose checkpoints stay for good. A plan counts them too. No torch here."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

#: Those of a list, or 1, 2, 4, 8, …
Milestones = Literal["powers_of_two"] | Sequence[int]


def is_milestone(step: int, milestones: Milestones) -> bool:
    """Return whether a step is one of the milestones."""
    if milestones == "powers_of_two":
        return step > 0 and step & (step - 1) == 0
    return step in milestones
