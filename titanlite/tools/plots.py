"""The curves of several runs, as points and as a PNG (matplotlib, the extra `plots`)."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from titanlite.runs.read import Run

#: Okabe and Ito's colours (jfly.uni-koeln.de/color), which colour-blind readers can distinguish, on white and on black;
#: then six that are far from these and from each other in CIELAB.
COLORS = (
    *("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9"),
    *("#6000e0", "#00c000", "#e000c0", "#606000", "#c00040", "#6060e0"),
)
#: Dashes (pixels drawn, pixels skipped, …) of training and of validation; the second pair is for runs whose colour
#: repeats.
_DASHES = (((), (6, 4)), ((14, 3, 2, 3), (2, 3)))
#: Later curves are drawn over earlier ones and are thinner, so that equal curves do not look like a single one.
_WIDTHS = (3.2, 2.2, 1.6)
#: Maximum number of points of a curve.
POINTS = 1500

Point = tuple[float, float]


class PlotsMissing(ImportError):
    """matplotlib is not installed; the text names the extra."""


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
    #: Validation loss; its points are marked.
    validation: bool = False


@dataclass(frozen=True)
class Chart:
    title: str
    unit: str
    curves: tuple[Curve, ...]
    from_zero: bool = False


def charts(runs: Sequence[Run], labels: Sequence[str]) -> list[Chart]:
    """Return the loss chart and, where the runs record it, the speed chart."""
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
    """Return at most about `limit` points: of each group the lowest and the highest, so that no spike is lost.

    A point that is not finite stays too: the curve has a gap there.
    """
    if len(points) <= limit:
        return tuple(points)
    size = math.ceil(2 * len(points) / limit)
    kept: list[Point] = []
    for begin in range(0, len(points), size):
        group = points[begin : begin + size]
        gap = [p for p in group if not math.isfinite(p[1])][:1]
        finite = sorted((p for p in group if math.isfinite(p[1])), key=lambda p: p[1])
        kept += sorted({*finite[:1], *finite[-1:], *gap}, key=lambda p: p[0])
    return tuple(kept)


def draw_png(found: Sequence[Chart], path: Path) -> None:
    """Draw all charts below each other in one picture. Raises PlotsMissing without matplotlib, OSError."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise PlotsMissing(
            f"matplotlib is needed to draw it ({error}); install it with: pip install 'titanlite[plots]'"
        ) from None
    # A Figure, not pyplot: it needs no display and shares no state with a caller's plots.
    # The legend is below the charts, with a line per curve: names may be as long as folders.
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
