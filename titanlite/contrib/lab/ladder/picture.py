"""The picture of a ladder, as SVG: points, the law's lines, and the prediction.

It follows the reader's light or dark, and needs no package.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from titanlite.cli.pictures import COLORS, DARK_COLORS, Axis, Frame, ticks
from titanlite.contrib.lab.ladder.fit import Fit
from titanlite.contrib.lab.ladder.law import Point, groups_of_sizes
from titanlite.contrib.lab.ladder.predict import Prediction
from titanlite.contrib.lab.ladder.report import decimals
from titanlite.utils import human_count

_FRAME = Frame(width=960, height=540, top=24, bottom=56, left=72, right=190)
#: Room for the number of the prediction.
_LABEL = 110
#: Points of a line.
_PIECES = 60
#: Classes, without their colours: some programs that draw SVG know no variables of CSS.
_STYLE = """
text{font:14px system-ui,sans-serif}
.dim{font-size:13px}
.law{fill:none;stroke-width:1.6}
.best{fill:none;stroke-width:1.4;stroke-dasharray:2 5}
.aim{stroke-width:2.2}
"""
#: Of the background, of text, of other text and of lines.
_LIGHT = ("#ffffff", "#24292f", "#6a737d", "#d8dee4")
_DARK = ("#0d1117", "#e6edf3", "#9198a1", "#30363d")


@dataclass(frozen=True)
class _Axes:
    """Logarithms of FLOPs across, losses up."""

    across: Axis
    up: Axis

    def place(self, compute: float, loss: float) -> tuple[float, float]:
        return self.across.place(math.log10(compute)), self.up.place(loss)


def picture(found: Fit, prediction: Prediction | None) -> str:
    """Return the picture of a fit; prediction: of the target, if there is one."""
    groups = groups_of_sizes(found.points)
    axes = _axes(found, prediction)
    parts = [_head(len(groups)), *_grid(axes)]
    parts.append(_best_line(found, axes))
    for number, group in enumerate(groups):
        parts += _size(found, group, axes, number)
    if prediction is not None:
        parts += _target(prediction, axes)
    parts += _legend(groups, prediction)
    return "\n".join([*parts, "</svg>", ""])


def _axes(found: Fit, prediction: Prediction | None) -> _Axes:
    """Return axes that hold all points and the interval of the prediction."""
    computes = [point.compute for point in found.points]
    losses = [point.loss for point in found.points]
    if prediction is not None:
        computes.append(6 * prediction.parameters * prediction.tokens)
        losses += [prediction.low, prediction.high]
    first = math.floor(math.log10(min(computes)) - 0.1)
    last = math.ceil(math.log10(max(computes)) + 0.1)
    across = _FRAME.across([float(power) for power in range(first, last + 1)])
    return _Axes(across, _FRAME.up(ticks(min(losses), max(losses), 7)))


def _head(count: int) -> str:
    """Return the beginning: sizes, styles, the background."""
    light = _colored(_LIGHT, COLORS, count)
    dark = _colored(_DARK, DARK_COLORS, count)
    size = f'viewBox="0 0 {_FRAME.width} {_FRAME.height}"'
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img">',
            "<title>Loss of each run of a ladder against its FLOPs, with the fitted law</title>",
            f"<style>{_STYLE}{light}@media (prefers-color-scheme:dark){{{dark}}}</style>",
            f'<rect class="back" width="{_FRAME.width}" height="{_FRAME.height}"/>',
        ]
    )


def _colored(basic: Sequence[str], curves: Sequence[str], count: int) -> str:
    """Return the colours of the classes; p0, l0: points and line of the first size."""
    back, text, dim, line = basic
    parts = [
        f".back{{fill:{back}}}text,.spot{{fill:{text}}}.aim{{stroke:{text}}}",
        f".dim{{fill:{dim}}}.best{{stroke:{dim}}}.grid{{stroke:{line}}}",
    ]
    for number in range(count):
        color = curves[number % len(curves)]
        parts.append(f".p{number}{{fill:{color}}}.l{number}{{stroke:{color}}}")
    return "".join(parts)


def _grid(axes: _Axes) -> list[str]:
    """Return the grid lines with their numbers, and what the axes show."""
    left = _FRAME.left
    right = _FRAME.width - _FRAME.right
    bottom = _FRAME.height - _FRAME.bottom
    parts = []
    for text, height in axes.up.lines():
        parts.append(f'<path class="grid" d="M{left} {height}H{right}"/>')
        parts.append(f'<text x="{left - 10}" y="{height + 5}" text-anchor="end">{text}</text>')
    for power in axes.across.values:
        place = axes.across.place(power)
        parts.append(f'<path class="grid" d="M{place} {_FRAME.top}V{bottom}"/>')
        label = f'10<tspan dy="-6" font-size="11">{power:.0f}</tspan>'
        parts.append(f'<text x="{place}" y="{bottom + 22}" text-anchor="middle">{label}</text>')
    middle = (left + right) / 2
    parts.append(
        f'<text class="dim" x="{middle}" y="{_FRAME.height - 10}" text-anchor="middle">FLOPs of '
        "the training, 6 · parameters · tokens</text>"
    )
    height = (_FRAME.top + bottom) / 2
    parts.append(
        f'<text class="dim" x="18" y="{height}" text-anchor="middle" '
        f'transform="rotate(-90 18 {height})">loss, nats per token</text>'
    )
    return parts


def _path(found: list[tuple[float, float]]) -> str:
    """Return a line through pixels, without what lies above or below the picture."""
    low = _FRAME.top
    high = _FRAME.height - _FRAME.bottom
    inside = [f"{x},{y}" for x, y in found if low <= y <= high]
    return f"M{' '.join(inside)}" if inside else ""


def _between(first: float, last: float) -> list[float]:
    """Return numbers at equal ratios."""
    ratio = last / first
    return [first * ratio ** (number / _PIECES) for number in range(_PIECES + 1)]


def _best_line(found: Fit, axes: _Axes) -> str:
    """Return the least loss of each compute, by the law."""
    ends = axes.across.values
    line = []
    for compute in _between(10 ** ends[0], 10 ** ends[-1]):
        size = found.law.best_size(compute)
        line.append(axes.place(compute, found.law.loss(size, compute / 6 / size)))
    return f'<path class="best" d="{_path(line)}"/>'


def _size(found: Fit, group: Sequence[Point], axes: _Axes, number: int) -> list[str]:
    """Return the points of a size, and the law's line through them."""
    size = group[0].parameters
    line = []
    for tokens in _between(group[0].tokens / 1.3, group[-1].tokens * 1.3):
        line.append(axes.place(6 * size * tokens, found.law.loss(size, tokens)))
    parts = [f'<path class="law l{number}" d="{_path(line)}"/>']
    for point in group:
        x, y = axes.place(point.compute, point.loss)
        parts.append(
            f'<circle class="p{number}" cx="{x}" cy="{y}" r="4.5"><title>'
            f"{human_count(point.parameters)} parameters, {human_count(point.tokens)} tokens: "
            f"{point.loss:.4f}</title></circle>"
        )
    return parts


def _target(prediction: Prediction, axes: _Axes) -> list[str]:
    """Return the prediction with its interval."""
    compute = 6 * prediction.parameters * prediction.tokens
    x, y = axes.place(compute, prediction.loss)
    _, low = axes.place(compute, prediction.low)
    _, high = axes.place(compute, prediction.high)
    diamond = f"M{x - 7} {y}L{x} {y - 7}L{x + 7} {y}L{x} {y + 7}Z"
    digits = decimals(prediction.error)
    label = f"{prediction.loss:.{digits}f} ± {prediction.error:.{digits}f}"
    is_right = x + _LABEL < _FRAME.width - _FRAME.right
    begin = x + 13 if is_right else x - 13
    anchor = "start" if is_right else "end"
    return [
        f'<text x="{begin}" y="{y + 5}" text-anchor="{anchor}">{label}</text>',
        f'<path class="aim" d="M{x} {low}V{high}M{x - 6} {low}H{x + 6}M{x - 6} {high}H{x + 6}"/>',
        f'<path class="spot" d="{diamond}"/>',
    ]


def _legend(groups: Sequence[Sequence[Point]], prediction: Prediction | None) -> list[str]:
    """Return a line for each size, then one for the prediction and one for the dotted line."""
    left = _FRAME.width - _FRAME.right + 18
    parts = [f'<text class="dim" x="{left}" y="{_FRAME.top + 10}">parameters</text>']
    y = _FRAME.top + 34
    for number, group in enumerate(groups):
        parts.append(f'<circle class="p{number}" cx="{left + 6}" cy="{y - 5}" r="5"/>')
        parts.append(f'<text x="{left + 20}" y="{y}">{human_count(group[0].parameters)}</text>')
        y += 23
    if prediction is not None:
        middle = y - 5
        diamond = f"M{left} {middle}l6 -6l6 6l-6 6Z"
        parts.append(f'<path class="spot" d="{diamond}"/>')
        size = human_count(prediction.parameters)
        parts.append(f'<text x="{left + 20}" y="{y}">{size}, predicted</text>')
        y += 23
    parts.append(f'<path class="best" d="M{left - 2} {y - 5}h16"/>')
    parts.append(f'<text x="{left + 20}" y="{y}">best for its FLOPs</text>')
    return parts
