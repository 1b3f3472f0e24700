"""The comparison as one HTML file with tables and curves that show their values; it fetches nothing."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from html import escape
from itertools import groupby
from typing import Any

from titanlite.metrics.jsonl import json_value
from titanlite.tools.compare import Comparison, tables
from titanlite.tools.plots import Chart, Curve
from titanlite.utils import Table

_WIDTH, _HEIGHT = 960, 380
#: Margins, in pixels; the left one has room for a speed of eight digits.
_TOP, _BOTTOM, _LEFT, _RIGHT = 14, 46, 100, 48

_STYLE = """
:root { color-scheme: light dark; --line: #8884; --dim: #888; }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 1080px; margin: 2rem auto; padding: 0 1rem; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: .25rem .9rem .25rem 0; border-bottom: 1px solid var(--line); text-align: right; vertical-align: top; }
th.left, td.left { text-align: left; }
label, li { overflow-wrap: anywhere; }
svg { width: 100%; height: auto; touch-action: pan-y; } svg text { font-size: 13px; fill: currentColor; }
.grid { stroke: var(--line); } polyline { fill: none; stroke-width: 2; stroke-linejoin: round; }
[hidden] { display: none !important; }
.legend { display: flex; flex-wrap: wrap; gap: .2rem 1.4rem; padding: 0; list-style: none; border: 0; }
output { font-variant-numeric: tabular-nums; font-weight: 600; }
.notes { color: var(--dim); }
"""

_SCRIPT = """
const all = (query, from = document) => [...from.querySelectorAll(query)];
const boxes = all("input[data-run]");
const update = () => boxes.forEach(box =>
  all(`[data-of="${box.dataset.run}"]`).forEach(part => part.toggleAttribute("hidden", !box.checked)));
boxes.forEach(box => box.onchange = update);
update();  // a browser may remember unchecked boxes
const number = value => typeof value === "number" ? value.toLocaleString("en", {maximumSignificantDigits: 6}) : value;
JSON.parse(document.getElementById("curves").textContent).forEach((chart, n) => {
  const plot = document.getElementById(`plot-${n}`), dots = all(".dot", plot), values = all(`#values-${n} output`);
  const show = wanted => chart.curves.forEach((curve, i) => {
    const [step, value] = curve.points.reduce((best, point) =>
      Math.abs(point[0] - wanted) < Math.abs(best[0] - wanted) ? point : best);
    values[i].textContent = `${number(value)} at step ${number(step)}`;
    dots[i].toggleAttribute("hidden", typeof value !== "number");
    dots[i].setAttribute("cx", chart.x[0] * step + chart.x[1]);
    if (typeof value === "number") dots[i].setAttribute("cy", chart.y[0] * value + chart.y[1]);
  });
  plot.onpointermove = plot.onpointerdown = event => {
    const point = new DOMPoint(event.clientX, event.clientY).matrixTransform(plot.getScreenCTM().inverse());
    show((point.x - chart.x[1]) / chart.x[0]);
  };
  show(1e15);  // the last step
});
"""


def render_page(comparison: Comparison, charts: Sequence[Chart], written: str) -> str:
    """Return the page. written: its time as text."""
    title = escape(" and ".join(comparison.labels) if len(comparison.labels) < 3 else f"{len(comparison.labels)} runs")
    overview, figures, *differences = map(_table, tables(comparison))
    drawn = [_draw(n, chart) for n, chart in enumerate(chart for chart in charts if _finite(chart))]
    # "<" could end the script element.
    data = json.dumps([data for _, data in drawn], separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    boxes = "\n".join(
        f'<label><input type="checkbox" data-run="{curve.run}" checked>{_name(curve)}</label>'
        for curve in charts[0].curves
        if not curve.validation
    )
    parts = [
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>titanlite: {title}</title>\n<style>{_STYLE}</style>\n</head>\n<body>",
        f"<h1>{title}</h1>\n{overview}\n<h2>Figures</h2>\n{figures}",
        '<p class="notes">tokens/s and MFU: medians of the logged rows without the first two of each attempt. '
        "Memory: rank 0. In parentheses: against the first run.</p>",
        f'<h2>Runs shown</h2>\n<fieldset class="legend">\n{boxes}\n</fieldset>',
        *(html for html, _ in drawn),
        *(f'<p class="notes">{escape(chart.title)}: no finite value.</p>' for chart in charts if not _finite(chart)),
        *(f"<h2>What differs</h2>\n{table}" for table in differences),
        *(f'<p class="notes">Note: {escape(note)}</p>' for note in comparison.notes),
        f'<p class="notes">Written by titanlite, {escape(written)}.</p>',
        f'<script type="application/json" id="curves">{data}</script>',
        f"<script>{_SCRIPT}</script>\n</body>\n</html>\n",
    ]
    return "\n".join(parts)


def _table(table: Table) -> str:
    def cells(row: Sequence[str], tag: str) -> str:
        sides = (' class="left"' if i in table.left else "" for i in range(len(row)))
        return "".join(f"<{tag}{side}>{escape(text)}</{tag}>" for side, text in zip(sides, row, strict=True))

    head, body = cells(table.columns, "th"), "\n".join(f"<tr>{cells(row, 'td')}</tr>" for row in table.rows)
    return f'<div class="wide"><table>\n<thead><tr>{head}</tr></thead>\n<tbody>\n{body}\n</tbody>\n</table></div>'


def _name(curve: Curve) -> str:
    line = "╍" if curve.validation else "━"
    return f'<span style="color: {curve.color}"> {line * 2} </span>{escape(curve.label)}'


def _finite(chart: Chart) -> list[tuple[float, float]]:
    return [point for curve in chart.curves for point in curve.points if math.isfinite(point[1])]


def _draw(n: int, chart: Chart) -> tuple[str, dict[str, Any]]:
    """Return a chart with at least one finite value as HTML, and its data for the script.

    Data: the points of each curve, with texts for values that are not finite; factor and summand that turn a step and a
    value into pixels.
    """
    steps, values = zip(*_finite(chart), strict=True)
    columns = ticks(min(steps), max(steps), 8)
    lines = ticks(0.0 if chart.from_zero else min(values), max(values), 6)
    across = (_WIDTH - _LEFT - _RIGHT) / (columns[-1] - columns[0])
    up = (_HEIGHT - _TOP - _BOTTOM) / (lines[-1] - lines[0])
    x, y = (across, _LEFT - across * columns[0]), (-up, _HEIGHT - _BOTTOM + up * lines[0])
    title, bottom = escape(chart.title), _HEIGHT - _BOTTOM
    svg = [f'<svg id="plot-{n}" viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{title} by step">']
    for value in lines:
        at = y[0] * value + y[1]
        svg.append(f'<path class="grid" d="M{_LEFT} {at:.1f}H{_WIDTH - _RIGHT}"/>')
        svg.append(f'<text x="{_LEFT - 8}" y="{at + 4:.1f}" text-anchor="end">{value:,.10g}</text>')
    for value in columns:
        at = x[0] * value + x[1]
        svg.append(f'<path class="grid" d="M{at:.1f} {_TOP}V{bottom}"/>')
        svg.append(f'<text x="{at:.1f}" y="{bottom + 20}" text-anchor="middle">{value:,.10g}</text>')
    svg.append(f'<text x="{_WIDTH / 2}" y="{_HEIGHT - 6}" text-anchor="middle">step</text>')
    for curve in chart.curves:
        look = f'stroke="{curve.color}"' + ' stroke-dasharray="6 4"' * curve.validation
        svg.append(f'<g data-of="{curve.run}">')
        for is_finite, part in groupby(curve.points, key=lambda point: math.isfinite(point[1])):
            if is_finite:
                places = [(f"{x[0] * step + x[1]:.1f}", f"{y[0] * value + y[1]:.1f}") for step, value in part]
                svg.append(f'<polyline {look} points="{" ".join(map(",".join, places))}"/>')
                if curve.validation or len(places) == 1:
                    svg += [f'<circle cx="{a}" cy="{b}" r="4" fill="{curve.color}"/>' for a, b in places]
        svg.append(f'<circle class="dot" r="5" fill="{curve.color}" hidden/></g>')
    items = "\n".join(f'<li data-of="{one.run}">{_name(one)} <output></output></li>' for one in chart.curves)
    parts = [
        f'<h2>{title} <small class="notes">{escape(chart.unit)}</small></h2>',
        *(*svg, "</svg>"),
        '<p class="notes">Point at the chart or tap it for the values at another step.</p>',
        f'<ul class="legend" id="values-{n}">\n{items}\n</ul>',
    ]
    curves = [{"run": c.run, "points": [(step, json_value(value)) for step, value in c.points]} for c in chart.curves]
    return "\n".join(parts), {"x": x, "y": y, "curves": curves}


def ticks(low: float, high: float, count: int) -> list[float]:
    """Return about `count` round numbers at equal distances, the first at most `low`, the last at least `high`."""
    if high <= low:
        room = abs(low) * 0.1 or 1.0
        low, high = low - room, high + room
    rough = (high - low) / count
    unit = 10.0 ** math.floor(math.log10(rough))
    step = next(unit * m for m in (1, 2, 2.5, 5, 10) if unit * m >= rough * 0.999)
    first, final = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(i * step, 12) for i in range(first, final + 1)]
