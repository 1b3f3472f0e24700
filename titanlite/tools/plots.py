"""The curves of several runs, as points and as a PNG (matplotlib, the extra `plots`)."""

from __future__ import annotations

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

Point = tuple[float, float]


class PlotsMissing(ImportError):
    """matplotlib is not installed; the text names the extra."""


@dataclass(frozen=True)
class Curve:
    """One line: (step, value) in order of steps; values may be NaN. run: its number decides the colour."""

    label: str
    points: Sequence[Point]
    run: int = 0
    #: Validation loss: dashed, and its points are marked.
    validation: bool = False

    @property
    def color(self) -> str:
        return COLORS[self.run % len(COLORS)]


@dataclass(frozen=True)
class Chart:
    title: str
    unit: str
    curves: Sequence[Curve]
    from_zero: bool = False


def charts(runs: Sequence[Run], labels: Sequence[str]) -> list[Chart]:
    """Return the loss chart and, where the runs record it, the speed chart."""

    def curves(name: str, suffix: str = "", validation: bool = False) -> list[Curve]:
        points = ([(row["step"], row[name]) for row in run.rows if name in row] for run in runs)
        named = enumerate(zip(labels, points, strict=True))
        return [Curve(label + suffix, found, i, validation) for i, (label, found) in named if found]

    losses = [*curves("loss"), *curves("validation_loss", ", validation", validation=True)]
    found = [Chart("Loss", "nats per token", losses)]
    speeds = curves("total_tps")
    return found + ([Chart("Speed", "tokens/s, all devices", speeds, from_zero=True)] if speeds else [])


def draw_png(found: Sequence[Chart], path: Path) -> None:
    """Draw all charts below each other in one picture. Raises PlotsMissing without matplotlib, OSError."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        message = f"matplotlib is needed to draw it ({error}); install it with: pip install 'titanlite[plots]'"
        raise PlotsMissing(message) from None
    # The legend is below the charts, with a line per curve: names may be as long as folders.
    names = [curve.label for curve in found[0].curves]
    figure = Figure(figsize=(10, 4.2 * len(found) + 0.24 * len(names) + 0.2), dpi=110, layout="constrained")
    axes = figure.subplots(len(found), 1, squeeze=False)[:, 0]
    for axis, chart in zip(axes, found, strict=True):
        for curve in chart.curves:
            axis.plot(
                *zip(*curve.points, strict=True),
                color=curve.color,
                linestyle="--" if curve.validation else "-",
                marker="o" if curve.validation or len(curve.points) == 1 else None,
                markersize=4,
            )
        if chart.from_zero:
            axis.set_ylim(bottom=0)
        axis.set(title=chart.title, xlabel="step", ylabel=chart.unit)
        axis.yaxis.set_major_formatter("{x:,g}")
        axis.xaxis.set_major_formatter("{x:,g}")
        axis.grid(alpha=0.25)
    figure.legend(axes[0].get_lines(), names, loc="outside lower left", frameon=False)
    figure.savefig(path)
