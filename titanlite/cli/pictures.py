"""Curves over steps as SVG in a page, light or dark as its reader's browser is."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from titanlite.cli import render_page

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

Point = tuple[float, float]


@dataclass(frozen=True)
class Curve:
    """Points over an axis; one that is not finite interrupts the line.

    color: its number. is_dashed: with a dot at each point.
    """

    label: str
    points: Sequence[Point]
    color: int = 0
    is_dashed: bool = False


@dataclass(frozen=True)
class Chart:
    """Curves over the steps of a run. from_zero: the vertical axis begins at 0."""

    title: str
    up: str
    curves: Sequence[Curve]
    from_zero: bool = False


def draw(chart: Chart) -> str:
    """Return a chart with its legend, as SVG; without a finite value its axes are empty."""
    frame = Frame(width=960, height=400, top=34, bottom=46, left=100, right=48)
    return render_page(
        "charts.svg.jinja",
        chart=chart,
        frame=frame,
        colors=list(zip(COLORS, DARK_COLORS, strict=True)),
        **_placed(chart, frame),
    )


def _placed(chart: Chart, frame: Frame) -> dict[str, Any]:
    """Return grid lines and curves as the template draws them, in pixels."""
    points = [point for curve in chart.curves for point in curve.points if math.isfinite(point[1])]
    if not points:
        return {"across": [], "up": [], "curves": []}
    xs, ys = zip(*points, strict=True)
    lowest = 0.0 if chart.from_zero else min(ys)
    across = frame.across(ticks(min(xs), max(xs), frame.width // 120))
    up = frame.up(ticks(lowest, max(ys), frame.height // 60))
    curves = []
    for curve in chart.curves:
        parts: list[list[Point]] = [[]]
        for x, y in curve.points:
            if math.isfinite(y):
                parts[-1].append((across.place(x), up.place(y)))
            elif parts[-1]:
                parts.append([])
        style = f"c{curve.color % len(COLORS)}"
        curves.append((curve, style, [part for part in parts if part]))
    return {"across": across.lines(), "up": up.lines(), "curves": curves}


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
    if high - low <= _SAME * max(abs(low), abs(high)):
        room = abs(low) * 0.1 or 1.0
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
