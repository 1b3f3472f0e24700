"""The comparison as one HTML file with tables and curves that show their values; it fetches
nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import groupby
from typing import Any

from titanlite.metrics.jsonl import json_value
from titanlite.tools import render_page
from titanlite.tools.commands.compare import Comparison, tables
from titanlite.tools.commands.plots import COLORS, DARK_COLORS, Chart, Curve

#: Pixels; the left margin has room for a speed of eight digits.
_SIZES = {"width": 960, "height": 380, "top": 14, "bottom": 46, "left": 100, "right": 48}


def comparison_page(comparison: Comparison, charts: Sequence[Chart], written: str) -> str:
    """Return the page. written: its time as text."""
    labels = comparison.labels
    return render_page(
        "comparison.html.jinja",
        **_SIZES,
        frame=_SIZES,
        colors=list(zip(COLORS, DARK_COLORS, strict=True)),
        title=" and ".join(labels) if len(labels) < 3 else f"{len(labels)} runs",
        tables=tables(comparison),
        runs=[curve for curve in charts[0].curves if not curve.validation],
        plots=[_plot(chart) for chart in charts if _finite(chart)],
        empty=[chart for chart in charts if not _finite(chart)],
        notes=comparison.notes,
        written=written,
    )


def _finite(chart: Chart) -> list[tuple[float, float]]:
    return [point for curve in chart.curves for point in curve.points if math.isfinite(point[1])]


def _plot(chart: Chart) -> dict[str, Any]:
    """Return a chart with at least one finite value as the page draws it: places in pixels, and
    data for its script.

    Data: the points of each curve, with texts for values that are not finite, and their tokens and
    seconds.
    """
    steps, values = zip(*_finite(chart), strict=True)
    columns = ticks(min(steps), max(steps), 8)
    lines = ticks(0.0 if chart.from_zero else min(values), max(values), 6)
    low = _SIZES["height"] - _SIZES["bottom"]
    across = (_SIZES["width"] - _SIZES["left"] - _SIZES["right"]) / (columns[-1] - columns[0])
    up = (low - _SIZES["top"]) / (lines[-1] - lines[0])
    x, y = (across, _SIZES["left"] - across * columns[0]), (-up, low + up * lines[0])

    def place(scale: tuple[float, float], value: float) -> float:
        return round(scale[0] * value + scale[1], 1)

    def parts(points: Sequence[tuple[float, float]]) -> list[list[tuple[float, float]]]:
        groups = groupby(points, key=lambda point: math.isfinite(point[1]))
        return [
            [(place(x, step), place(y, value)) for step, value in part]
            for finite, part in groups
            if finite
        ]

    return {
        "chart": chart,
        "lines": [(f"{value:,.10g}", place(y, value)) for value in lines],
        "columns": [(f"{value:,.10g}", place(x, value)) for value in columns],
        "curves": [(curve, parts(curve.points)) for curve in chart.curves],
        "data": {"from_zero": chart.from_zero, "curves": [_data(curve) for curve in chart.curves]},
    }


def _data(curve: Curve) -> dict[str, Any]:
    """Return what the page's script needs to draw a curve."""
    return {
        "run": curve.run,
        "validation": curve.validation,
        "points": [(step, json_value(value)) for step, value in curve.points],
        "tokens": list(curve.tokens),
        "seconds": [round(value, 3) for value in curve.seconds],
    }


def ticks(low: float, high: float, count: int) -> list[float]:
    """Return about `count` round numbers at equal distances, the first at most `low`, the last at
    least `high`.
    """
    if high <= low:
        room = abs(low) * 0.1 or 1.0
        low, high = low - room, high + room
    rough = (high - low) / count
    unit = 10.0 ** math.floor(math.log10(rough))
    step = next(unit * m for m in (1, 2, 2.5, 5, 10) if unit * m >= rough * 0.999)
    first, final = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(i * step, 12) for i in range(first, final + 1)]
