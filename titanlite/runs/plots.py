"""The curves of several runs: as points, as a PNG (matplotlib, the extra `plots`)."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from titanlite.runs.read import Run

#: Okabe and Ito's colours (jfly.uni-koeln.de/color), told apart by colour-blind readers, on white and on black; then
#: six that are far from these and from each other in CIELAB.
COLORS = (
    *("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9"),
    *("#6000e0", "#00c000", "#e000c0", "#606000", "#c00040", "#6060e0"),
)
#: Dashes (pixels drawn, pixels left out, …) of training and of validation; the second pair is for runs that repeat a
#: colour.
_DASHES = (((), (6, 4)), ((14, 3, 2, 3), (2, 3)))
#: Later curves are drawn over earlier ones and are thinner, so that equal curves can be told from a single one.
_WIDTHS = (3.2, 2.2, 1.6)
#: Points of a curve that are drawn.
POINTS = 1500

Point = tuple[float, float]


class PlotsMissing(ImportError):
    """matplotlib is not there; the text names the extra."""


@dataclass(frozen=True)
class Curve:
    """One line: (step, value) in order of steps; values may be NaN."""

    label: str
    color: str
    points: tuple[Point, ...]
    #: Index of the run.
    run: int = 0
    #: Of the line, in pixels.
    width: float = _WIDTHS[0]
    dash: tuple[int, ...] = ()
    #: Held-out loss, whose points are marked.
    validation: bool = False


@dataclass(frozen=True)
class Chart:
    title: str
    unit: str
    curves: tuple[Curve, ...]
    from_zero: bool = False


def charts(runs: Sequence[Run], labels: Sequence[str]) -> list[Chart]:
    """The loss chart and, where the runs say it, that of the speed."""
    losses: list[Curve] = []
    speeds: list[Curve] = []
    for i, (run, label) in enumerate(zip(runs, labels, strict=True)):
        color, width = COLORS[i % len(COLORS)], _WIDTHS[min(i, len(_WIDTHS) - 1)]
        dash, dashed = _DASHES[i // len(COLORS) % len(_DASHES)]
        losses.append(Curve(label, color, thin([(row["step"], row["loss"]) for row in run.training]), i, width, dash))
        held_out = thin([(row["step"], row["validation_loss"]) for row in run.validations])
        if held_out:
            losses.append(Curve(f"{label}, validation", color, held_out, i, width, dashed, validation=True))
        speed = thin([(row["step"], row["total_tps"]) for row in run.training if "total_tps" in row])
        if speed:
            speeds.append(Curve(label, color, speed, i, width, dash))
    found = [Chart("Loss", "nats per token", tuple(losses))]
    return found + ([Chart("Speed", "tokens/s, all devices", tuple(speeds), from_zero=True)] if speeds else [])


def thin(points: Sequence[Point], limit: int = POINTS) -> tuple[Point, ...]:
    """At most about `limit` points; of each stretch the lowest and the highest stay, so that no spike is lost.

    So does one that is not finite: the curve is broken there.
    """
    if len(points) <= limit:
        return tuple(points)
    size = math.ceil(2 * len(points) / limit)
    kept: list[Point] = []
    for begin in range(0, len(points), size):
        stretch = points[begin : begin + size]
        odd = [p for p in stretch if not math.isfinite(p[1])][:1]
        finite = [p for p in stretch if math.isfinite(p[1])]
        ends = [min(finite, key=_value), max(finite, key=_value)] if finite else []
        kept += sorted({*ends, *odd}, key=lambda p: p[0])
    return tuple(kept)


def _value(point: Point) -> float:
    return point[1]


def draw_png(found: Sequence[Chart], path: Path) -> None:
    """All charts below each other in one picture. Raises PlotsMissing without matplotlib, OSError."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise PlotsMissing(
            f"matplotlib is needed to draw it ({error}); install it with: pip install 'titanlite[plots]'"
        ) from None
    # A Figure of its own, not pyplot: no display, and no state that a caller's own plots would share.
    # The legend has a line per curve below the charts: names may be as long as folders.
    names = [textwrap.fill(curve.label, 100) for curve in found[0].curves]
    lines = sum(name.count("\n") + 1 for name in names)
    figure = Figure(figsize=(10, 4.2 * len(found) + 0.24 * lines + 0.2), dpi=110, layout="constrained")
    axes = figure.subplots(len(found), 1, squeeze=False)[:, 0]
    for axis, chart in zip(axes, found, strict=True):
        for curve in chart.curves:
            axis.plot(
                *zip(*curve.points, strict=True),
                color=curve.color,
                linewidth=curve.width,
                linestyle=(0, [length / 2 for length in curve.dash]) if curve.dash else "-",
                marker="o" if curve.validation or len(curve.points) == 1 else None,
                markersize=4,
            )
        if chart.from_zero:
            axis.set_ylim(bottom=0)
        axis.set(title=chart.title, xlabel="step", ylabel=chart.unit)
        axis.yaxis.set_major_formatter("{x:,g}")
        axis.xaxis.set_major_formatter("{x:,g}")
        axis.grid(alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
    figure.legend(axes[0].get_lines(), names, loc="outside lower left", frameon=False)
    figure.savefig(path)
