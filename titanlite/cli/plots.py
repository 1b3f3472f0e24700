"""The curves of several runs, as points and as a PNG (matplotlib, the extra `plots`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from titanlite.cli.pictures import COLORS
from titanlite.runs.read import Run
from titanlite.utils import pip_install

Point = tuple[float, float]


class PlotsMissing(ImportError):
    """matplotlib is not installed; the text names the extra."""


@dataclass(frozen=True)
class Curve:
    """One line: (step, value) in order of steps; values may be NaN.

    run: its number decides the colour.
    """

    label: str
    points: Sequence[Point]
    run: int
    #: Validation loss: dashed, and its points are marked.
    validation: bool

    @property
    def color(self) -> str:
        return COLORS[self.run % len(COLORS)]

    @property
    def style(self) -> str:
        """The class of the page that has the colour, on white and on dark grey."""
        return f"c{self.run % len(COLORS)}"


@dataclass(frozen=True)
class Chart:
    """Curves over one vertical axis. from_zero: the axis begins at 0."""

    title: str
    unit: str
    curves: Sequence[Curve]
    from_zero: bool = False


def charts(runs: Sequence[Run], labels: Sequence[str]) -> list[Chart]:
    """Return the chart of losses, and one for each other figure that a run records."""

    def curves(name: str, suffix: str = "", validation: bool = False) -> list[Curve]:
        found = []
        for number, (run, label) in enumerate(zip(runs, labels, strict=True)):
            points = [(row["step"], row[name]) for row in run.rows if name in row]
            if points:
                found.append(Curve(label + suffix, points, number, validation))
        return found

    losses = [*curves("loss"), *curves("validation_loss", ", validation", validation=True)]
    reserved = any("reserved_gib" in row for run in runs for row in run.rows)
    further = [
        Chart("Speed", "tokens/s, all devices", curves("total_tps"), from_zero=True),
        Chart("Gradient norm", "before clipping", curves("grad_norm")),
        Chart("Learning rate", "", curves("lr"), from_zero=True),
        Chart(
            "Memory",
            f"GiB of rank 0, {'reserved' if reserved else 'the peak'}",
            curves("reserved_gib" if reserved else "memory_gib"),
            from_zero=True,
        ),
    ]
    return [Chart("Loss", "nats per token", losses), *(chart for chart in further if chart.curves)]


def draw_png(found: Sequence[Chart], path: Path) -> None:
    """Draw all charts below each other in one picture.

    Raises PlotsMissing without matplotlib, OSError.
    """
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError:
        message = f"drawing needs the package matplotlib: {pip_install('matplotlib')}"
        raise PlotsMissing(message) from None
    except ImportError as error:
        message = f"matplotlib cannot be imported ({error}): {pip_install('matplotlib')}"
        raise PlotsMissing(message) from None
    # The legend is below the charts, with a line per curve: names may be as long as folders.
    names = [curve.label for curve in found[0].curves]
    figure = Figure(
        figsize=(10, 4.2 * len(found) + 0.24 * len(names) + 0.2), dpi=110, layout="constrained"
    )
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
