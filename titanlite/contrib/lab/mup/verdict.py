"""From sizes of activations to slopes and a verdict. No torch here."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import linear_regression

#: Slopes of the change with muP lie within plus and minus this. A wrong rule is off by the root of
#: the width at least, a slope of 1/2. This is half of it.
LIMIT = 0.25


@dataclass(frozen=True)
class Line:
    """One kind of activation over all widths."""

    kind: str
    mup: bool
    widths: Sequence[int]
    #: Mean absolute changes by width, means over seeds.
    changes: Sequence[float]

    @property
    def slope(self) -> float:
        """The slope of log2(change) against log2(width); NaN where one is 0 or not finite."""
        if not all(0 < change < math.inf for change in self.changes):
            return math.nan
        across = list(map(math.log2, self.widths))
        return linear_regression(across, list(map(math.log2, self.changes))).slope

    @property
    def is_flat(self) -> bool:
        return abs(self.slope) <= LIMIT  # False for NaN


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
