"""The comparison as one HTML file with tables and curves that show their values; it fetches nothing."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from html import escape
from itertools import groupby
from typing import Any

from titanlite.metrics.jsonl import json_value
from titanlite.tools.compare import Comparison, tables
from titanlite.tools.plots import Chart, Curve, Point
from titanlite.utils import Table

_WIDTH, _HEIGHT = 960, 380
_TOP, _BOTTOM = 14, 46
#: Maximum width of a character of the axes' numbers, in pixels.
_CHARACTER = 8.5
#: Curves with at most so many points get a mark on each.
_MARKED = 200

_STYLE = """
:root { color-scheme: light dark; --line: #8884; --dim: #888; }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 1080px; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.1rem; margin: 2rem 0 .5rem; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: .25rem .9rem .25rem 0; border-bottom: 1px solid var(--line); text-align: right; vertical-align: top; }
th.left, td.left { text-align: left; } th { font-weight: 600; }
label, li { overflow-wrap: anywhere; }
svg { width: 100%; height: auto; display: block; } svg text { font-size: 13px; fill: currentColor; }
.grid { stroke: var(--line); } .curve { fill: none; stroke-linejoin: round; }
.mark, .dot { stroke: none; } .at { stroke: currentColor; stroke-dasharray: 2 3; } .plot { touch-action: pan-y; }
[hidden] { display: none !important; }
.legend { display: flex; flex-wrap: wrap; gap: .2rem 1.4rem; margin: .5rem 0; padding: 0; list-style: none; border: 0; }
.legend svg { display: inline-block; width: 28px; height: 10px; margin-right: .4rem; }
output { font-variant-numeric: tabular-nums; font-weight: 600; margin-left: .3rem; }
.notes { color: var(--dim); }
"""

_SCRIPT = """
const all = (query, from = document) => [...from.querySelectorAll(query)];
const boxes = all("input[data-run]");
const update = () => boxes.forEach(box =>
  all(`[data-of="${box.dataset.run}"]`).forEach(part => part.toggleAttribute("hidden", !box.checked)));
boxes.forEach(box => box.onchange = update);
all("button").forEach(button => button.onclick = () => {
  boxes.forEach(box => box.checked = button.value === "all");
  update();
});
update();  // a browser may remember unchecked boxes
const number = value => typeof value === "number" ? value.toLocaleString("en", {maximumSignificantDigits: 6}) : value;
JSON.parse(document.getElementById("curves").textContent).forEach((chart, n) => {
  const plot = document.getElementById(`plot-${n}`), line = plot.querySelector(".at");
  const dots = all(".dot", plot), values = all(`#values-${n} output`), title = document.getElementById(`step-${n}`);
  const place = ([factor, first], value) => factor * value + first;
  const nearest = (points, step) => points.reduce((best, point) =>
    Math.abs(point[0] - step) < Math.abs(best[0] - step) ? point : best);
  const show = wanted => {
    const shown = chart.curves.filter(curve => boxes[curve.run].checked);
    if (!shown.length) return;
    const step = nearest(shown.map(curve => nearest(curve.points, wanted)), wanted)[0];
    title.textContent = `step ${number(step)}`;
    line.setAttribute("d", `M${place(chart.x, step)} ${chart.top}V${chart.bottom}`);
    chart.curves.forEach((curve, i) => {
      const [at, value] = nearest(curve.points, step);
      values[i].textContent = number(value) + (at === step ? "" : ` at ${number(at)}`);
      dots[i].toggleAttribute("hidden", typeof value !== "number");
      dots[i].setAttribute("cx", place(chart.x, at));
      if (typeof value === "number") dots[i].setAttribute("cy", place(chart.y, value));
    });
  };
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
    overview, figures, *differences = tables(comparison)
    finite = [chart for chart in charts if any(math.isfinite(value) for c in chart.curves for _, value in c.points)]
    plots = [_Plot(chart) for chart in finite]
    parts = [
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>titanlite: {title}</title>\n<style>{_STYLE}</style>\n</head>\n<body>",
        f"<h1>{title}</h1>",
        _table(overview),
        f"<h2>Figures</h2>\n{_table(figures)}",
        '<p class="notes">tokens/s and MFU: medians of the logged rows without the first two of each attempt. '
        "Memory: rank 0. In parentheses: against the first run.</p>",
        *([_switches(charts[0])] if charts else []),
        *(plot.html(n) for n, plot in enumerate(plots)),
        *(f'<p class="notes">{escape(chart.title)}: no finite value.</p>' for chart in charts if chart not in finite),
        *(f"<h2>What differs</h2>\n{_table(table)}" for table in differences),
        *(f'<p class="notes">Note: {escape(note)}</p>' for note in comparison.notes),
        f'<p class="notes">Written by titanlite, {escape(written)}.</p>',
        f'<script type="application/json" id="curves">{_json([plot.data() for plot in plots])}</script>',
        f"<script>{_SCRIPT}</script>\n</body>\n</html>\n",
    ]
    return "\n".join(parts)


def _table(table: Table) -> str:
    def cell(i: int, text: str, tag: str) -> str:
        side = ' class="left"' if i in table.left else ""
        return f"<{tag}{side}>{escape(text)}</{tag}>"

    head = "".join(cell(i, text, "th") for i, text in enumerate(table.columns))
    body = "\n".join(f"<tr>{''.join(cell(i, text, 'td') for i, text in enumerate(row))}</tr>" for row in table.rows)
    return f'<div class="wide"><table>\n<thead><tr>{head}</tr></thead>\n<tbody>\n{body}\n</tbody>\n</table></div>'


def _json(value: Any) -> str:
    """Return JSON that is safe inside a script element."""
    return json.dumps(value, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")


def _switches(chart: Chart) -> str:
    """Return a check box for each run, which shows and hides it in all charts."""
    boxes = "\n".join(
        f'<label><input type="checkbox" data-run="{curve.run}" checked> {_sample(curve)}{escape(curve.label)}</label>'
        for curve in chart.curves
        if not curve.validation
    )
    buttons = '<button value="all">all</button> <button value="none">none</button>'
    return f'<h2>Runs shown {buttons}</h2>\n<fieldset class="legend">\n{boxes}\n</fieldset>'


def _sample(curve: Curve) -> str:
    return f'<svg viewBox="0 0 28 10" aria-hidden="true"><path d="M0 5H28" {_stroke(curve)}/></svg>'


def _stroke(curve: Curve) -> str:
    dash = f' stroke-dasharray="{" ".join(map(str, curve.dash))}"' if curve.dash else ""
    return f'class="curve" stroke="{curve.color}" stroke-width="{curve.width}"{dash}'


class _Plot:
    """A chart with at least one finite value, and the positions of its values on the page."""

    def __init__(self, chart: Chart) -> None:
        self.chart = chart
        points = [p for curve in chart.curves for p in curve.points if math.isfinite(p[1])]
        xs, ys = [p[0] for p in points], [p[1] for p in points]
        self._columns = ticks(min(xs), max(xs), 8)
        self._lines = ticks(0.0 if chart.from_zero else min(ys), max(ys), 6)
        x0, x1, y0, y1 = self._columns[0], self._columns[-1], self._lines[0], self._lines[-1]
        # Room for the longest number beside the axis, and for half of the last one below it.
        left = 12 + _CHARACTER * max(len(_tick(value)) for value in self._lines)
        self._right = _WIDTH - 4 - _CHARACTER * len(_tick(x1)) / 2
        across, up = (self._right - left) / (x1 - x0), (_HEIGHT - _TOP - _BOTTOM) / (y1 - y0)
        #: Factor and summand that turn a step, and a value, into pixels.
        self._x, self._y = (across, left - across * x0), (-up, _HEIGHT - _BOTTOM + up * y0)

    def html(self, n: int) -> str:
        title, unit = escape(self.chart.title), escape(self.chart.unit)
        items = "\n".join(
            f'<li data-of="{curve.run}">{_sample(curve)}{escape(curve.label)}<output></output></li>'
            for curve in self.chart.curves
        )
        return (
            f'<h2>{title} <small class="notes">{unit}</small></h2>\n{self._svg(n)}\n'
            f'<p class="notes">At <output id="step-{n}"></output>. Point at the chart, or tap it, to read another step.'
            f'</p>\n<ul class="legend" id="values-{n}">\n{items}\n</ul>'
        )

    def data(self) -> dict[str, Any]:
        """Return the points of each curve and their scales for the script. Values that are not finite are texts."""
        curves = [
            {"run": curve.run, "points": [(step, json_value(value)) for step, value in curve.points]}
            for curve in self.chart.curves
        ]
        return {"x": self._x, "y": self._y, "top": _TOP, "bottom": _HEIGHT - _BOTTOM, "curves": curves}

    def _place(self, point: Point) -> Point:
        return self._x[0] * point[0] + self._x[1], self._y[0] * point[1] + self._y[1]

    def _svg(self, n: int) -> str:
        label = f"{escape(self.chart.title)} by step"
        out = [f'<svg class="plot" id="plot-{n}" viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{label}">']
        left, bottom = self._place((self._columns[0], self._lines[0]))
        for value in self._lines:
            y = self._place((0, value))[1]
            out.append(f'<path class="grid" d="M{left:.1f} {y:.1f}H{self._right:.1f}"/>')
            out.append(f'<text x="{left - 8:.1f}" y="{y + 4:.1f}" text-anchor="end">{_tick(value)}</text>')
        for value in self._columns:
            x = self._place((value, 0))[0]
            out.append(f'<path class="grid" d="M{x:.1f} {_TOP}V{bottom:.1f}"/>')
            out.append(f'<text x="{x:.1f}" y="{bottom + 20:.1f}" text-anchor="middle">{_tick(value)}</text>')
        out.append(f'<text x="{(left + self._right) / 2:.1f}" y="{_HEIGHT - 6}" text-anchor="middle">step</text>')
        for curve in self.chart.curves:
            out.append(f'<g data-of="{curve.run}">')
            for part in _finite_parts(curve.points):
                places = [self._place(point) for point in part]
                out.append(f'<polyline {_stroke(curve)} points="{" ".join(f"{x:.1f},{y:.1f}" for x, y in places)}"/>')
                if curve.validation or len(curve.points) <= _MARKED:
                    size = f'r="{4 if curve.validation else 2.4}" fill="{curve.color}"'
                    out += [f'<circle class="mark" cx="{x:.1f}" cy="{y:.1f}" {size}/>' for x, y in places]
            out.append(f'<circle class="dot" r="5" fill="{curve.color}" hidden/></g>')
        return "\n".join([*out, '<path class="at"/>', "</svg>"])


def _tick(value: float) -> str:
    return f"{value:,.10g}"


def _finite_parts(points: Sequence[Point]) -> Iterator[list[Point]]:
    """Yield the parts of a curve between values that are not finite."""
    for finite, part in groupby(points, key=lambda point: math.isfinite(point[1])):
        if finite:
            yield list(part)


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
