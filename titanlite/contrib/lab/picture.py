"""The picture of a sweep: the loss over the learning rate, or over the first number that varies."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from titanlite.cli.pictures import COLORS, DARK_COLORS, Frame, ticks
from titanlite.config.toml import quote
from titanlite.contrib.lab.members import MemberResult
from titanlite.utils import templates

_LEGEND_LINE = 20
_MOST_TICKS = 9
#: A loss so many times as far above the best as the median is stands at the upper edge.
_FAR = 8.0
#: Values whose ends have this ratio get a logarithmic axis.
_WIDE = 5.0

Values = Mapping[str, Any]


@dataclass(frozen=True)
class Row:
    """A run of the sweep. values: by the names that tables show. loss: None where it has none."""

    values: Values
    result: MemberResult
    loss: float | None


def shown(value: Any) -> str:
    """Return a value for people: a text without quotes, a float as short as it can be."""
    if isinstance(value, str):
        return value
    if isinstance(value, float) and float(f"{value:g}") == value:
        return f"{value:g}"
    return quote(value)


def picture(title: str, rows: Sequence[Row]) -> str | None:
    """Return the picture as SVG, a line for each set of the other values.

    None: no number varies, or no run has a loss. A browser shows it light or dark.
    """
    key = _horizontal(rows)
    losses = [row.loss for row in rows if row.loss is not None]
    if key is None or not losses:
        return None
    lines: dict[str, list[Row]] = {}
    for row in sorted(rows, key=lambda row: float(row.values[key])):
        others = [f"{name} = {shown(value)}" for name, value in row.values.items() if name != key]
        lines.setdefault(", ".join(others) or key, []).append(row)
    legend = _LEGEND_LINE * len(lines)
    frame = Frame(760, 430 + legend, top=64, bottom=56 + legend, left=92, right=42)
    values = sorted({float(row.values[key]) for row in rows})
    is_log = values[0] > 0 and values[-1] / values[0] >= _WIDE
    scale = math.log10 if is_log else float
    axis = frame.across([scale(values[0]), scale(values[-1])])
    limit = min(losses) + _FAR * (statistics.median(losses) - min(losses))
    up = frame.up(ticks(min(losses), min(max(losses), max(limit, losses[0])), 6))

    def mark(row: Row) -> tuple[float, float, bool, str]:
        loss = up.values[-1] if row.loss is None else min(row.loss, up.values[-1])
        text = row.result.state if row.loss is None else f"{row.loss:.4f}"
        x = axis.place(scale(row.values[key]))
        return x, up.place(loss), row.loss is None, f"{row.result.name}: {text}"

    some = values[:: math.ceil(len(values) / _MOST_TICKS)]
    page = templates(Path(__file__).parent).get_template("sweep.svg.jinja")
    return str(
        page.render(
            **asdict(frame),
            title=title,
            key=key,
            lines=[(label, list(map(mark, members))) for label, members in lines.items()],
            across=[(f"{value:.4g}", axis.place(scale(value))) for value in some],
            up=up.lines(),
            legend=frame.height - legend,
            legend_line=_LEGEND_LINE,
            colors=list(zip(COLORS, DARK_COLORS, strict=True)),
        )
    )


def _horizontal(rows: Sequence[Row]) -> str | None:
    """Return the learning rate, else the first number that varies; None: there is none."""
    numbers = []
    for label in rows[0].values:
        found = [row.values.get(label) for row in rows]
        if all(type(value) in (int, float) for value in found) and len(set(found)) > 1:
            numbers.append(label)
    return max(numbers, key=lambda label: label.endswith("lr"), default=None)
