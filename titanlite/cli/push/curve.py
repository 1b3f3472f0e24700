"""The loss curve of a model card, as SVG. It follows the reader's light or dark, and needs no
package.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from titanlite.cli import render_page
from titanlite.cli.pictures import COLORS, DARK_COLORS, Axis, Frame, ticks
from titanlite.runs.read import Row

FILE = "loss.svg"
_FRAME = Frame(width=760, height=380, top=48, bottom=56, left=70, right=24)
#: Points of a line: more are averaged over equal stretches of steps.
_MOST = 400
#: A loss so many times as far above the last as the median is lies off the picture.
_FAR = 6.0
#: The height of the picture is at least this part of the lowest loss, where there are such losses.
_LEAST = 0.5
Point = tuple[float, float]


def picture(rows: Sequence[Row], title: str) -> str | None:
    """Return the losses over the steps; None where there are not two."""
    losses = _thinned(_points(rows, "loss"))
    held_out = _thinned(_points(rows, "validation_loss"))
    if len(losses) < 2:
        return None
    both = [*losses, *held_out]
    steps = [step for step, _ in both]
    across = _FRAME.across(ticks(min(0.0, *steps), max(steps), 6))
    up = _FRAME.up(ticks(min(loss for _, loss in both), _highest(both), 6))
    return render_page(
        "loss.svg.jinja",
        frame=_FRAME,
        title=title,
        across=across.lines(),
        up=up.lines(),
        losses=_line(losses, across, up),
        held_out=_line(held_out, across, up),
        dots=_line(held_out, across, up).split() if len(held_out) <= 40 else [],
        light=COLORS,
        dark=DARK_COLORS,
    )


def _points(rows: Sequence[Row], name: str) -> list[Point]:
    return [(row["step"], row[name]) for row in rows if math.isfinite(row.get(name, math.nan))]


def _thinned(points: list[Point]) -> list[Point]:
    """Return at most `_MOST` points: means of neighbours."""
    if len(points) <= _MOST:
        return points
    size = math.ceil(len(points) / _MOST)
    found = []
    for start in range(0, len(points), size):
        part = points[start : start + size]
        mean = sum(loss for _, loss in part) / len(part)
        found.append((part[-1][0], mean))
    return found


def _highest(points: Sequence[Point]) -> float:
    """Return the top of the picture: the first losses may be far above all others."""
    losses = sorted(loss for _, loss in points)
    low = losses[0]
    middle = losses[len(losses) // 2]
    return min(losses[-1], low + max(_FAR * (middle - low), _LEAST * abs(low)))


def _line(points: Sequence[Point], across: Axis, up: Axis) -> str:
    """Return points as pixels; those above the picture stand at its top."""
    pixels = []
    for step, loss in points:
        height = max(up.place(loss), float(_FRAME.top))
        pixels.append(f"{across.place(step)},{height}")
    return " ".join(pixels)
