"""What pictures share: the colours of curves, and the frame of a picture in a page."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

#: Colours of curves on white: Okabe and Ito's (jfly.uni-koeln.de/color), which colour-blind readers
#: can distinguish. Then six that are far from these and from each other in CIELAB. Each has a
#: contrast of 3 at least.
COLORS = (
    "#0072b2",
    "#d55e00",
    "#009e73",
    "#c674a2",
    "#c48200",
    "#00959f",
    "#6000e0",
    "#00a700",
    "#e000c0",
    "#606000",
    "#c00040",
    "#6060e0",
)
#: The same on the dark grey of browsers.
DARK_COLORS = (
    "#0072b2",
    "#d55e00",
    "#009e73",
    "#cc79a7",
    "#e69f00",
    "#56b4e9",
    "#7e2afa",
    "#00c000",
    "#e000c0",
    "#6b6a0e",
    "#c91747",
    "#6060e0",
)

#: Numbers this much apart, as a part of them, have the same grid lines.
_SAME = 1e-8
#: Floats beyond these lose digits, or become infinite in sums.
_LEAST = 1e-300
_MOST = 1e300


@dataclass(frozen=True)
class Axis:
    """Grid lines at values, and the pixels of the first and the last of them."""

    values: Sequence[float]
    start: float
    end: float

    @property
    def pixels(self) -> float:
        """The pixels of one unit; negative on an axis that points up."""
        return (self.end - self.start) / (self.values[-1] - self.values[0])

    def place(self, value: float) -> float:
        """Return the pixel of a value."""
        return round(self.start + self.pixels * (value - self.values[0]), 1)

    def lines(self) -> list[tuple[str, float]]:
        """Return the text of each grid line and its pixel."""
        return [(f"{value:,.10g}", self.place(value)) for value in self.values]


@dataclass(frozen=True)
class Frame:
    """A picture's size and margins, in pixels."""

    width: int
    height: int
    top: int
    bottom: int
    left: int
    right: int

    def across(self, values: Sequence[float]) -> Axis:
        return Axis(values, self.left, self.width - self.right)

    def up(self, values: Sequence[float]) -> Axis:
        return Axis(values, self.height - self.bottom, self.top)


def ticks(low: float, high: float, count: int) -> list[float]:
    """Return about `count` round numbers at equal distances, the first at most `low`, the last at
    least `high`.

    Numbers that are equal in the digits of grid lines get room around them.
    """
    low = max(low, -_MOST)
    high = min(high, _MOST)
    if high - low <= max(_SAME * max(abs(low), abs(high)), _LEAST):
        room = abs(low) * 0.1
        if room < _LEAST:
            room = 1.0
        low = low - room
        high = high + room
    rough = (high - low) / count
    power = math.floor(math.log10(rough))
    unit = 10.0**power
    step = next(unit * m for m in (1, 2, 2.5, 5, 10) if unit * m >= rough * 0.999)
    first = math.floor(low / step + 1e-9)
    final = math.ceil(high / step - 1e-9)
    digits = max(12, 2 - power)
    return [round(number * step, digits) for number in range(first, final + 1)]
