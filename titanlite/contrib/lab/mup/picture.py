"""The picture of a coordinate check (matplotlib, the extra `plots`): a small panel for each kind of
activation, with muP above and without it below.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from titanlite.cli.plots import PlotsMissing
from titanlite.contrib.lab.mup.verdict import Line
from titanlite.utils import pip_install

#: Of later steps: darker on white, lighter on dark grey, all of one blue.
_LIGHT_STEPS = ("#9ecae1", "#4f9ed0", "#1f6fb5", "#08407a")
_DARK_STEPS = ("#2f5f8a", "#4c8cc4", "#7db7e8", "#c4e1fb")
#: Room above the curves, as a part of their height.
_ROOM = 0.16
_GOOD = ("#00703c", "#45c48b")
_BAD = ("#b3261e", "#ff8a80")


def draw(lines: Sequence[Line], title: str, path: Path) -> list[Path]:
    """Draw the picture on white, and beside it one on dark grey; return both paths.

    Raises PlotsMissing without matplotlib, OSError.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        message = f"drawing needs the package matplotlib ({error}): {pip_install('matplotlib')}"
        raise PlotsMissing(message) from None
    written = []
    for is_dark in (False, True):
        place = path.with_stem(f"{path.stem}-dark") if is_dark else path
        figure = Figure(figsize=(2.3 * len(_kinds(lines)) + 1, 5.6), dpi=110, layout="constrained")
        _fill(figure, lines, title, is_dark)
        figure.savefig(place, facecolor=figure.get_facecolor())
        written.append(place)
    return written


def _kinds(lines: Sequence[Line]) -> list[str]:
    return list(dict.fromkeys(line.kind for line in lines))


def _fill(figure: Any, lines: Sequence[Line], title: str, is_dark: bool) -> None:
    ink = "#e6e6e6" if is_dark else "#222222"
    ground = "#1c1c1e" if is_dark else "#ffffff"
    figure.set_facecolor(ground)
    kinds = _kinds(lines)
    axes = figure.subplots(2, len(kinds), squeeze=False, sharex=True, sharey="col")
    for line in lines:
        axis = axes[0 if line.mup else 1][kinds.index(line.kind)]
        _panel(axis, line, is_dark, ground)
    for column, kind in enumerate(kinds):
        _make_room(axes[0][column])
        axes[0][column].set_title(kind, color=ink, fontsize=11)
        axes[1][column].set_xlabel("width", color=ink)
    axes[0][0].set_ylabel("with muP\nmean |change|", color=ink)
    axes[1][0].set_ylabel("without\nmean |change|", color=ink)
    for axis in axes.flat:
        axis.set_facecolor(ground)
        axis.tick_params(colors=ink, which="both", labelsize=8)
        axis.grid(alpha=0.25, color=ink, linewidth=0.6)
        for spine in axis.spines.values():
            spine.set_color(ink)
            spine.set_alpha(0.4)
    figure.suptitle(title, color=ink, fontsize=11)
    legend = figure.legend(
        axes[0][0].get_lines(),
        [line.get_label() for line in axes[0][0].get_lines()],
        loc="outside lower center",
        ncols=8,
        frameon=False,
    )
    for text in legend.get_texts():
        text.set_color(ink)


def _make_room(axis: Any) -> None:
    """Leave room above the curves, where the slope stands."""
    low, high = axis.get_ylim()
    axis.set_ylim(low, high * (high / low) ** _ROOM)


def _panel(axis: Any, line: Line, is_dark: bool, ground: str) -> None:
    colors = _DARK_STEPS if is_dark else _LIGHT_STEPS
    last = len(line.changes) - 1
    for place, changes in enumerate(line.changes):
        shade = round(place * (len(colors) - 1) / max(last, 1))
        axis.plot(
            line.widths,
            changes,
            color=colors[shade],
            marker="o",
            markersize=3.5,
            linewidth=1.6,
            label=f"step {place + 1}",
        )
    axis.set_xscale("log", base=2)
    axis.set_yscale("log", base=2)
    axis.set_xticks(line.widths, [str(width) for width in line.widths])
    axis.minorticks_off()
    color = (_GOOD if line.is_flat else _BAD)[is_dark]
    axis.text(
        0.05,
        0.94,
        f"slope {line.slope:+.2f}",
        transform=axis.transAxes,
        va="top",
        fontsize=9,
        color=color,
        bbox={"facecolor": ground, "edgecolor": "none", "pad": 1.5},
    )
