"""Curves over axes as SVG, for pages and as files. They follow the reader's light or dark, and need
no package.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

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
#: Floats beyond these lose digits, or become infinite in sums.
_LEAST = 1e-300
_MOST = 1e300


Point = tuple[float, float]


@dataclass(frozen=True)
class Curve:
    """Points over an axis; one that is not finite interrupts the line.

    color: its number. mark: drawn at each point.
    """

    label: str
    points: Sequence[Point]
    color: int = 0
    line: Literal["solid", "dashed", "dotted", "none"] = "solid"
    mark: Literal["", "dot", "cross"] = ""

    @property
    def style(self) -> str:
        """The class of the picture that has the colour, on white and on dark grey."""
        return f"c{self.color % len(COLORS)}"


@dataclass(frozen=True)
class Chart:
    """Curves over one pair of axes, and what these show.

    columns: values of the vertical grid lines; none: round numbers. from_zero: the vertical axis
    begins at 0.
    """

    title: str
    across: str
    up: str
    curves: Sequence[Curve]
    columns: Sequence[float] = ()
    from_zero: bool = False
    log_across: bool = False
    log_up: bool = False

    def has(self, point: Point) -> bool:
        """Return whether a point has a place in the chart."""
        x, y = point
        is_positive = (x > 0 or not self.log_across) and (y > 0 or not self.log_up)
        return is_positive and math.isfinite(x) and math.isfinite(y)


def draw(charts: Sequence[Chart], title: str, columns: int = 1, *, in_page: bool = False) -> str:
    """Return charts in rows of so many, with one legend, as SVG.

    in_page: as a part of an HTML page. Axes of a chart without a finite value are empty.
    """
    wide = Frame(width=960, height=400, top=34, bottom=46, left=100, right=48)
    small = Frame(width=300, height=220, top=34, bottom=46, left=76, right=24)
    frame = wide if columns == 1 else small
    labels = {curve.label: curve for chart in charts for curve in chart.curves if curve.label}
    panels = []
    for number, chart in enumerate(charts):
        row, column = divmod(number, columns)
        panels.append((column * frame.width, row * frame.height, _panel(chart, frame)))
    return render_page(
        "charts.svg.jinja",
        title=title,
        in_page=in_page,
        frame=frame,
        panels=panels,
        labels=labels.values(),
        width=frame.width * columns,
        height=frame.height * math.ceil(len(charts) / columns),
        colors=list(zip(COLORS, DARK_COLORS, strict=True)),
    )


def _panel(chart: Chart, frame: Frame) -> dict[str, Any]:
    """Return a chart as the template draws it, in pixels."""
    points = [point for curve in chart.curves for point in curve.points if chart.has(point)]
    if not points:
        return {"chart": chart, "across": [], "up": [], "curves": []}
    xs, ys = zip(*points, strict=True)
    columns = chart.columns or _grid(min(xs), max(xs), frame.width // 120, chart.log_across)
    lowest = 0.0 if chart.from_zero else min(ys)
    rows = _grid(lowest, max(ys), frame.height // 60, chart.log_up)
    across = Axis(columns, frame.left, frame.width - frame.right, chart.log_across)
    up = Axis(rows, frame.height - frame.bottom, frame.top, chart.log_up)
    curves = []
    for curve in chart.curves:
        parts: list[list[Point]] = [[]]
        for point in curve.points:
            if chart.has(point):
                parts[-1].append((across.place(point[0]), up.place(point[1])))
            elif parts[-1]:
                parts.append([])
        curves.append((curve, [part for part in parts if part]))
    return {"chart": chart, "across": across.lines(), "up": up.lines(), "curves": curves}


@dataclass(frozen=True)
class Axis:
    """Grid lines at values, and the pixels of the first and the last of them.

    log: equal ratios have equal distances.
    """

    values: Sequence[float]
    start: float
    end: float
    log: bool = False

    @property
    def pixels(self) -> float:
        """The pixels of one unit; negative on an axis that points up."""
        return (self.end - self.start) / (self.values[-1] - self.values[0])

    def place(self, value: float) -> float:
        """Return the pixel of a value."""
        if not self.log:
            return round(self.start + self.pixels * (value - self.values[0]), 1)
        share = math.log(value / self.values[0]) / math.log(self.values[-1] / self.values[0])
        return round(self.start + share * (self.end - self.start), 1)

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


def _grid(low: float, high: float, count: int, log: bool) -> list[float]:
    """Return the values of the grid lines of an axis: with `log` powers of ten, and 2 and 5 times
    them where these are few.
    """
    if not log:
        return ticks(low, high, count)
    first = math.floor(math.log10(low))
    last = max(math.ceil(math.log10(high)), first + 1)
    powers = [10.0**power for power in range(first, last + 1)]
    if len(powers) > 4:
        return powers
    values = sorted({power * times for power in powers for times in (1, 2, 5)})
    start = max(place for place, value in enumerate(values) if value <= low)
    end = min(place for place, value in enumerate(values) if value >= high)
    return values[start : max(end, start + 1) + 1]
