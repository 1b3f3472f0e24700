"""The picture of a sweep: loss over the learning rate, or another number; a line for each value of
the other keys.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from titanlite.tools import render_page
from titanlite.tools.pictures import COLORS, DARK_COLORS, Axis, Frame, ticks
from titanlite.tools.sweep.folder import Plan
from titanlite.tools.sweep.table import (
    METRIC_NAMES,
    Group,
    families,
    horizontal_key,
    in_words,
    telling_keys,
)

_LEGEND_LINE = 20
_WIDTH = 760
#: Height of the picture above its legend.
_HEIGHT = 430
#: Steps of a logarithmic axis within a decade, from the coarsest.
_IN_DECADE = ((1,), (1, 3), (1, 2, 5))
_MOST_TICKS = 9
#: A loss so many times as far above the best as the median is lies off the picture.
_FAR = 8.0
#: Room beside the first and the last value, as a part of their distance.
_PAD = 0.06


@dataclass(frozen=True)
class Mark:
    """A point in pixels. top, bottom: of its spread over seeds."""

    x: float
    y: float
    top: float
    bottom: float
    title: str
    #: Its loss, where it is higher than the picture.
    above: str = ""
    is_best: bool = False


@dataclass(frozen=True)
class Bad:
    """A point without a loss: it stands above the others. state: diverged, or another one."""

    x: float
    state: str
    title: str


@dataclass(frozen=True)
class Line:
    """The points of one set of other keys, from left to right."""

    label: str
    #: Class of its colour.
    style: str
    marks: Sequence[Mark]
    bad: Sequence[Bad]

    @property
    def path(self) -> str:
        """The curve; it leaves out what is higher than the picture."""
        return " ".join(f"{mark.x},{mark.y}" for mark in self.marks if not mark.above)


@dataclass(frozen=True)
class _Scale:
    """A horizontal axis. is_log: equal ratios have equal widths."""

    axis: Axis
    is_log: bool
    values: Sequence[float]

    def place(self, value: float) -> float:
        return self.axis.place(math.log10(value) if self.is_log else value)

    def lines(self) -> list[tuple[str, float]]:
        return [(f"{value:.4g}", self.place(value)) for value in self.values]


@dataclass(frozen=True)
class _Axes:
    """Both axes. key: that of the horizontal one."""

    key: str
    across: _Scale
    up: Axis


def picture(plan: Plan, groups: Sequence[Group], best: Group | None) -> str | None:
    """Return the picture as SVG; None where no number varies, or no point has a loss.

    A browser shows it light or dark, as its user has chosen.
    """
    key = horizontal_key(plan)
    means = [group.mean for group in groups if group.mean is not None]
    if key is None or not means:
        return None
    by_others = families(groups, key)
    frame = Frame(
        width=_WIDTH,
        height=_HEIGHT + _LEGEND_LINE * len(by_others),
        top=64,
        bottom=56 + _LEGEND_LINE * len(by_others),
        left=78,
        right=28,
    )
    across = _scale(frame, [group.values[key] for group in groups])
    axes = _Axes(key, across, _vertical(frame, groups))
    lines = []
    for number, (label, members) in enumerate(by_others.items()):
        style = f"c{number % len(COLORS)}"
        lines.append(_line(label, style, members, axes, best))
    return render_page(
        "sweep.svg.jinja",
        **asdict(frame),
        title=f"{plan.title}: {METRIC_NAMES[plan.metric]} over {key}",
        unit=f"{METRIC_NAMES[plan.metric]}, nats per token",
        across=across.lines(),
        key=key,
        up=axes.up.lines(),
        lines=lines,
        legend=frame.height - _LEGEND_LINE * len(by_others),
        legend_line=_LEGEND_LINE,
        colors=list(zip(COLORS, DARK_COLORS, strict=True)),
        signs=_signs(lines),
        best=_best_text(best, plan, [*telling_keys(groups, key), key]),
    )


def _signs(lines: Sequence[Line]) -> str:
    """Return what the signs in the picture mean, those that it has."""
    states = sorted({bad.state for line in lines for bad in line.bad})
    others = [state for state in states if state != "diverged"]
    found = []
    if any(mark.above for line in lines for mark in line.marks):
        found.append("▲ higher than shown")
    if "diverged" in states:
        found.append("× diverged")
    if others:
        found.append(f"□ {' or '.join(others)}")
    return ", ".join(found)


def _best_text(best: Group | None, plan: Plan, keys: Sequence[str]) -> str:
    """Return the best point by the keys that tell it from others."""
    if best is None or best.mean is None:
        return ""
    values = {key: best.values[key] for key in keys}
    return f"best: {in_words(values)}, {METRIC_NAMES[plan.metric]} {best.mean:.4f}"


def _scale(frame: Frame, values: Sequence[float]) -> _Scale:
    low = min(values)
    high = max(values)
    is_log = low > 0 and high / low >= 5
    if not is_log:
        room = (high - low) * _PAD
        inside = [tick for tick in ticks(low, high, 6) if low - room <= tick <= high + room]
        return _Scale(frame.across([low - room, high + room]), False, inside)
    room = math.log10(high / low) * _PAD
    ends = [math.log10(low) - room, math.log10(high) + room]
    return _Scale(frame.across(ends), True, _log_ticks(10 ** ends[0], 10 ** ends[1]))


def _log_ticks(low: float, high: float) -> list[float]:
    """Return round numbers between two, as many as there is room for."""
    found: list[float] = []
    for digits in _IN_DECADE:
        finer = []
        for power in range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1):
            finer += [digit * 10.0**power for digit in digits]
        finer = [value for value in finer if low <= value <= high]
        if found and len(finer) > _MOST_TICKS:
            break
        found = finer
    return found


def _vertical(frame: Frame, groups: Sequence[Group]) -> Axis:
    """Return the axis of the losses; some may lie above it."""
    means = [group.mean for group in groups if group.mean is not None]
    low = min(means)
    limit = low + _FAR * (statistics.median(means) - low)
    shown = [mean for mean in means if mean <= limit] if limit > low else means
    ends = list(shown)
    for group in groups:
        if group.mean in shown and group.spread:
            ends += [group.mean - group.spread, group.mean + group.spread]
    return frame.up(ticks(min(ends), max(ends), 6))


def _line(label: str, style: str, groups: Sequence[Group], axes: _Axes, best: Group | None) -> Line:
    marks = []
    bad = []
    for group in sorted(groups, key=lambda group: float(group.values[axes.key])):
        if not group.is_whole:
            x = axes.across.place(float(group.values[axes.key]))
            bad.append(Bad(x, group.state, f"{in_words(group.values)}: {group.state}"))
        if group.mean is not None:
            marks.append(_mark(group, group.mean, axes, group is best))
    return Line(label, style, marks, bad)


def _mark(group: Group, mean: float, axes: _Axes, is_best: bool) -> Mark:
    up = axes.up
    is_above = mean > up.values[-1]
    spread = group.spread or 0.0
    seeds = f" ± {spread:.4f}, {len(group.losses)} seeds" if spread else ""
    return Mark(
        x=axes.across.place(float(group.values[axes.key])),
        y=up.end if is_above else up.place(mean),
        top=max(up.place(mean + spread), up.end),
        bottom=max(up.place(mean - spread), up.end),
        title=f"{in_words(group.values)}: {mean:.4f}{seeds}",
        above=f"{mean:.4g}" if is_above else "",
        is_best=is_best,
    )
