"""What all sections share."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field


class Section(BaseModel):
    """One `[section]`: nothing unknown, nothing converted (a string is never a number), nothing infinite."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False, protected_namespaces=())


Degree = Annotated[int, Field(ge=1)]
"""Ranks along one dimension of the mesh."""

DegreeOrRest = Literal[-1] | Degree
Ratio = Annotated[float, Field(ge=0, le=1)]
