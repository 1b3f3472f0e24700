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
#: Of training and of validation.
_DASHES: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...] = (((), (6, 4)), ((14, 3, 2, 3), (2, 3)))
#: Maximum number of points of a curve.
POINTS = 1500

Point = tuple[float, float]


class PlotsMissing(ImportError):
    """matplotlib is not installed; the text names the extra."""


@dataclass(frozen=True)
class Curve:
    """One line: (step, value) in order of steps; values may be NaN. run: its number decides the look."""

    label: str
    points: tuple[Point, ...]
    run: int = 0
    #: Validation loss; its points are marked.
    validation: bool = False

    @property
    def color(self) -> str:
        return COLORS[self.run % len(COLORS)]

    @property
    def width(self) -> float:
        """Pixels. Later curves are drawn over earlier ones, and are thinner: so equal curves do not look like one."""
        return (3.2, 2.2, 1.6)[min(self.run, 2)]

    @property
    def dash(self) -> tuple[int, ...]:
        """Pixels drawn, skipped, …; those of runs whose colour repeats differ from the first ones'."""
        return _DASHES[self.run // len(COLORS) % 2][self.validation]


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
        for curves, name, validation in (
            (losses, "loss", False),
            (losses, "validation_loss", True),
            (speeds, "total_tps", False),
        ):
            if points := thin([(row["step"], row[name]) for row in run.rows if name in row]):
                curves.append(Curve(f"{label}, validation" if validation else label, points, i, validation))
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
        finite = sorted((p for p in group if math.isfinite(p[1])), key=lambda p: p[1])
        gap = [p for p in group if not math.isfinite(p[1])]
        kept += sorted({*finite[:1], *finite[-1:], *gap[:1]}, key=lambda p: p[0])
    return tuple(kept)


def draw_png(found: Sequence[Chart], path: Path) -> None:
    """Draw all charts below each other in one picture. Raises PlotsMissing without matplotlib, OSError."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        message = f"matplotlib is needed to draw it ({error}); install it with: pip install 'titanlite[plots]'"
        raise PlotsMissing(message) from None
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
