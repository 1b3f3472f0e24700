"""From sizes of activations to slopes and a verdict. No torch here."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

#: Slopes of the change with muP lie within plus and minus this. A wrong rule is off by the root of
#: the width at least, a slope of 1/2. This is half of it.
LIMIT = 0.25


@dataclass(frozen=True)
class Line:
    """One kind of activation over all widths, means over seeds."""

    kind: str
    mup: bool
    widths: Sequence[int]
    #: Mean absolute values by step, from 0, then by width.
    values: Sequence[Sequence[float]]
    #: Mean absolute changes since step 0 by step, from 1, then by width.
    changes: Sequence[Sequence[float]]

    @property
    def slope(self) -> float:
        """The slope of the last change; NaN where there is none."""
        return slope(self.widths, self.changes[-1])

    @property
    def start_slope(self) -> float:
        """The slope of the initial values."""
        return slope(self.widths, self.values[0])

    @property
    def is_flat(self) -> bool:
        return abs(self.slope) <= LIMIT  # False for NaN


def slope(widths: Sequence[int], sizes: Sequence[float]) -> float:
    """Return the slope of log2(size) against log2(width), by least squares.

    NaN where a size is 0 or not finite.
    """
    if not all(0 < size < math.inf for size in sizes):
        return math.nan
    across = [math.log2(width) for width in widths]
    up = [math.log2(size) for size in sizes]
    middle = sum(across) / len(across)
    level = sum(up) / len(up)
    products = sum((x - middle) * (y - level) for x, y in zip(across, up, strict=True))
    return products / sum((x - middle) ** 2 for x in across)


def verdict(lines: Sequence[Line]) -> tuple[bool, list[str]]:
    """Return whether the lines with muP are flat, and what to tell."""
    bad = [line for line in lines if line.mup and not line.is_flat]
    told = []
    if bad:
        named = ", ".join(f"{line.kind} {line.slope:+.2f}" for line in bad)
        told.append(f"FAILED: with muP these slopes are not within {LIMIT} of 0: {named}")
    else:
        told.append(f"OK: with muP every slope is within {LIMIT} of 0")
    largest = max((line.slope for line in lines if not line.mup), default=math.nan)
    if not largest > LIMIT:
        told.append(
            "note: without muP nothing grows either, so the check tells little: raise optimizer.lr"
        )
    return not bad, told
