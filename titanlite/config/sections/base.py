"""What all sections share."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field


class Section(BaseModel):
    """One `[section]`: nothing unknown, nothing converted (a string is never a number), nothing infinite."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False, protected_namespaces=())


@dataclass(frozen=True)
class InWords:
    """What a pattern means, for people."""

    text: str


Location = Annotated[str, AfterValidator(os.path.expanduser)]
"""A file or folder; a leading `~` means the home folder, as in a shell."""

Degree = Annotated[int, Field(ge=1)]
"""Ranks along one dimension of the mesh."""

DegreeOrRest = Literal[-1] | Degree

Seed = Annotated[int, Field(ge=0, le=2**63 - 1 - 2**20)]
"""Room for a million ranks to add their number to it and still give torch the 64-bit integer that it takes."""

Step = Annotated[int, Field(ge=1)]

StepRange = Annotated[str, Field(pattern=r"^[1-9][0-9]*-[1-9][0-9]*$"), InWords('steps as "200-250"')]
"""First and last step, both included."""

NthOrOp = Annotated[str, Field(pattern=r"^([1-9][0-9]*|op)$"), InWords('"op" or a number as "2"')]
"""Every Nth block, or the policy by operation."""

Ratio = Annotated[float, Field(ge=0, le=1)]


def steps_of(item: int | str) -> tuple[int, int]:
    """First and last step of a `Step` or `StepRange`."""
    first, _, last = str(item).partition("-")
    return int(first), int(last or first)
