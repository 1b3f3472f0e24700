"""The comparison as one HTML file with tables and curves; it runs no script and fetches nothing."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from titanlite.cli import render_page
from titanlite.cli.comparison import Comparison, tables
from titanlite.cli.pictures import COLORS, DARK_COLORS, Frame, ticks
from titanlite.cli.plots import Chart, Point, charts

#: The left margin has room for a speed of eight digits.
_FRAME = Frame(width=960, height=380, top=14, bottom=46, left=100, right=48)


def comparison_page(comparison: Comparison, written: str) -> str:
    """Return the page. written: its time as text."""
    labels = comparison.labels
    drawn = charts(comparison.runs, labels)
    return render_page(
        "comparison.html.jinja",
        **asdict(_FRAME),
        colors=list(zip(COLORS, DARK_COLORS, strict=True)),
        title=" and ".join(labels) if len(labels) < 3 else f"{len(labels)} runs",
        tables=tables(comparison),
        plots=[_plot(chart) for chart in drawn if _finite(chart)],
        empty=[chart for chart in drawn if not _finite(chart)],
        notes=comparison.notes,
        written=written,
    )


def _finite(chart: Chart) -> list[Point]:
    return [point for curve in chart.curves for point in curve.points if math.isfinite(point[1])]


def _plot(chart: Chart) -> dict[str, Any]:
    """Return a chart with at least one finite value as the page draws it, in pixels."""
    steps, values = zip(*_finite(chart), strict=True)
    across = _FRAME.across(ticks(min(steps), max(steps), 8))
    up = _FRAME.up(ticks(0.0 if chart.from_zero else min(values), max(values), 6))

    def parts(points: Sequence[Point]) -> list[list[Point]]:
        """Return the places of points; a value that is not finite ends a part."""
        found: list[list[Point]] = []
        part: list[Point] = []
        for step, value in points:
            if math.isfinite(value):
                part.append((across.place(step), up.place(value)))
            elif part:
                found.append(part)
                part = []
        return [*found, part] if part else found

    return {
        "chart": chart,
        "lines": up.lines(),
        "columns": across.lines(),
        "curves": [(curve, parts(curve.points)) for curve in chart.curves],
    }
