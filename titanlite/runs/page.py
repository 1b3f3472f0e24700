"""The comparison as one HTML file: tables and curves, nothing fetched from anywhere."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from html import escape

from titanlite.runs.compare import Comparison, tables
from titanlite.runs.plots import Chart, Curve, Point
from titanlite.runs.table import Table

_WIDTH, _HEIGHT = 960, 380
_LEFT, _RIGHT, _TOP, _BOTTOM = 76, 16, 14, 46
#: Curves of at most so many points get a mark with a tip on each.
_MARKED = 200

_STYLE = """
:root { color-scheme: light dark; --line: #8884; --dim: #888; }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 1080px; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.1rem; margin: 2rem 0 .5rem; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: .25rem .9rem .25rem 0; border-bottom: 1px solid var(--line); text-align: right; vertical-align: top; }
th.left, td.left { text-align: left; } th { font-weight: 600; white-space: nowrap; }
svg { width: 100%; height: auto; display: block; } svg text { font-size: 13px; fill: currentColor; }
.grid { stroke: var(--line); } .curve { fill: none; stroke-linejoin: round; }
.validation { stroke-dasharray: 6 4; } .mark { stroke: none; }
.legend { display: flex; flex-wrap: wrap; gap: .2rem 1.4rem; margin: 0 0 .3rem; padding: 0; list-style: none; }
.legend svg { display: inline-block; width: 28px; height: 10px; margin-right: .4rem; }
.notes { color: var(--dim); }
"""


def render_page(comparison: Comparison, charts: Sequence[Chart], written: str) -> str:
    """The page. written: when, in words."""
    title = escape(" and ".join(comparison.labels) if len(comparison.labels) < 3 else f"{len(comparison.labels)} runs")
    overview, figures, *differences = tables(comparison)
    parts = [
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>titanlite: {title}</title>\n<style>{_STYLE}</style>\n</head>\n<body>",
        f"<h1>{title}</h1>",
        _table(overview),
        f"<h2>Figures</h2>\n{_table(figures)}",
        '<p class="notes">tokens/s and MFU: medians of the logged rows without the first two of each attempt. '
        "Memory: rank 0. In parentheses: against the first run.</p>",
        *map(_chart, charts),
        *(f"<h2>What differs</h2>\n{_table(table)}" for table in differences),
        *(f'<p class="notes">Note: {escape(note)}</p>' for note in comparison.notes),
        f'<p class="notes">Written by titanlite, {escape(written)}.</p>\n</body>\n</html>\n',
    ]
    return "\n".join(parts)


def _table(table: Table) -> str:
    def cell(i: int, text: str, tag: str) -> str:
        side = ' class="left"' if i in table.left else ""
        return f"<{tag}{side}>{escape(text)}</{tag}>"

    head = "".join(cell(i, text, "th") for i, text in enumerate(table.columns))
    body = "\n".join(f"<tr>{''.join(cell(i, text, 'td') for i, text in enumerate(row))}</tr>" for row in table.rows)
    return f'<div class="wide"><table>\n<thead><tr>{head}</tr></thead>\n<tbody>\n{body}\n</tbody>\n</table></div>'


def _chart(chart: Chart) -> str:
    legend = "\n".join(
        f'<li><svg viewBox="0 0 28 10" aria-hidden="true"><path d="M0 5H28" {_stroke(curve)}/></svg>'
        f"{escape(curve.label)}</li>"
        for curve in chart.curves
    )
    return (
        f'<h2>{escape(chart.title)} <small class="notes">{escape(chart.unit)}</small></h2>\n'
        f'<ul class="legend">\n{legend}\n</ul>\n{_svg(chart)}'
    )


def _stroke(curve: Curve) -> str:
    return (
        f'class="curve{" validation" if curve.validation else ""}" stroke="{curve.color}" stroke-width="{curve.width}"'
    )


def _svg(chart: Chart) -> str:
    points = [p for curve in chart.curves for p in curve.points if math.isfinite(p[1])]
    if not points:
        return '<p class="notes">No finite value.</p>'
    xs, ys = [p[0] for p in points], [p[1] for p in points]
    columns = ticks(min(xs), max(xs), 8)
    lines = ticks(0.0 if chart.from_zero else min(ys), max(ys), 6)
    x0, x1, y0, y1 = columns[0], columns[-1], lines[0], lines[-1]

    def place(point: Point) -> tuple[float, float]:
        x = _LEFT + (point[0] - x0) / (x1 - x0) * (_WIDTH - _LEFT - _RIGHT)
        return x, _HEIGHT - _BOTTOM - (point[1] - y0) / (y1 - y0) * (_HEIGHT - _TOP - _BOTTOM)

    out = [f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{escape(chart.title)} by step">']
    for value in lines:
        x, y = place((x0, value))
        out.append(f'<path class="grid" d="M{x:.1f} {y:.1f}H{_WIDTH - _RIGHT}"/>')
        out.append(f'<text x="{x - 8:.1f}" y="{y + 4:.1f}" text-anchor="end">{value:,.10g}</text>')
    for value in columns:
        x, y = place((value, y0))
        out.append(f'<path class="grid" d="M{x:.1f} {_TOP}V{y:.1f}"/>')
        out.append(f'<text x="{x:.1f}" y="{y + 20:.1f}" text-anchor="middle">{value:,.10g}</text>')
    out.append(f'<text x="{(_LEFT + _WIDTH - _RIGHT) / 2}" y="{_HEIGHT - 6}" text-anchor="middle">step</text>')
    for curve in chart.curves:
        stretches = list(_finite_stretches(curve.points))
        for stretch in stretches:
            path = " ".join(f"{x:.1f},{y:.1f}" for x, y in map(place, stretch))
            out.append(f'<polyline {_stroke(curve)} points="{path}"/>')
        if curve.validation or len(curve.points) <= _MARKED:
            for point in (p for stretch in stretches for p in stretch):
                out.append(_mark(curve, point, *place(point)))
    return "\n".join([*out, "</svg>"])


def _mark(curve: Curve, point: Point, x: float, y: float) -> str:
    tip = f"{escape(curve.label)}: step {point[0]:,.0f}, {point[1]:,.6g}"
    radius = 4 if curve.validation else 2.4
    place = f'cx="{x:.1f}" cy="{y:.1f}" r="{radius}"'
    return f'<circle class="mark" {place} fill="{curve.color}"><title>{tip}</title></circle>'


def _finite_stretches(points: Sequence[Point]) -> Iterator[list[Point]]:
    stretch: list[Point] = []
    for point in points:
        if math.isfinite(point[1]):
            stretch.append(point)
        elif stretch:
            yield stretch
            stretch = []
    if stretch:
        yield stretch


def ticks(low: float, high: float, count: int) -> list[float]:
    """About `count` round numbers at equal distances; the first is at or below `low`, the last at or above `high`."""
    if high <= low:
        room = abs(low) * 0.1 or 1.0
        low, high = low - room, high + room
    rough = (high - low) / count
    unit = 10.0 ** math.floor(math.log10(rough))
    step = next(unit * m for m in (1, 2, 2.5, 5, 10) if unit * m >= rough * 0.999)
    first, final = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(i * step, 12) for i in range(first, final + 1)]
