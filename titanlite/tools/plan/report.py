"""A plan as one HTML file: the memory over a step by part, a bar for each part at the peak; it
fetches nothing.
"""

from __future__ import annotations

from itertools import groupby

from titanlite.plan.parts import GIB, PARTS, Moment
from titanlite.plan.plan import Plan
from titanlite.plan.text import plan_rows, verdict
from titanlite.tools import render_page
from titanlite.tools.commands.compare_page import ticks
from titanlite.tools.commands.plots import COLORS

#: Pixels of the picture.
_SIZES = {"width": 960, "height": 420, "top": 14, "bottom": 40, "left": 70, "right": 20}
#: Pixels that a label at the right border takes.
_LABEL = 80
#: Most moments in the picture; of neighbours beyond that the fullest is shown.
_MOMENTS = 800


def plan_page(plan: Plan) -> str:
    """Return the page."""
    picture = _Picture(plan)
    peak = plan.memory.peak
    digits = picture.digits
    room = plan.cluster.gpu.memory - plan.overhead
    highest = max(range(len(picture.moments)), key=lambda index: picture.moments[index].total)
    return render_page(
        "plan.html.jinja",
        **_SIZES,
        plan=plan,
        verdict=verdict(plan),
        rows=list(plan_rows(plan)),
        areas=picture.areas(),
        lines=[(f"{value:,.10g}", picture.y(value * GIB)) for value in picture.lines],
        phases=picture.phases(),
        room=(f"{room / GIB:.1f} GiB for tensors", picture.y(room)),
        top_of_step=(
            f"peak {peak.total / GIB:.{digits}f} GiB",
            picture.x(highest + 0.5),
            picture.y(peak.total),
        ),
        digits=digits,
        bars=_bars(plan, picture),
        gib=GIB,
        data={"across": picture.across, "moments": picture.figures()},
    )


class _Picture:
    """The memory over a step, as areas by part."""

    def __init__(self, plan: Plan) -> None:
        self.moments = _fewer(plan.memory.moments)
        peak = plan.memory.peak.total
        #: Of a size in GiB.
        self.digits = 2 if peak >= GIB else 4
        self.names = [name for name in PARTS if self._is_visible(name)]
        self.colors = {name: COLORS[index % len(COLORS)] for index, name in enumerate(PARTS)}
        room = plan.cluster.gpu.memory - plan.overhead
        #: Heights of the grid in GiB.
        self.lines = ticks(0.0, max(room, peak) / GIB, 6)
        width = _SIZES["width"] - _SIZES["left"] - _SIZES["right"]
        #: Pixels of a moment.
        self.across = width / len(self.moments)

    def _is_visible(self, name: str) -> bool:
        return any(round(m.parts.get(name, 0) / GIB, self.digits) for m in self.moments)

    def x(self, moment: float) -> float:
        return round(_SIZES["left"] + self.across * moment, 1)

    def y(self, size: float) -> float:
        low = _SIZES["height"] - _SIZES["bottom"]
        return round(low - (low - _SIZES["top"]) * size / GIB / self.lines[-1], 1)

    def areas(self) -> list[tuple[str, str, str]]:
        """Return name, color and polygon of each part; a part lies on those before it."""
        found = []
        below = [0] * len(self.moments)
        for name in self.names:
            above = [
                size + moment.parts.get(name, 0)
                for size, moment in zip(below, self.moments, strict=True)
            ]
            found.append((name, self.colors[name], self._polygon(below, above)))
            below = above
        return found

    def _polygon(self, below: list[int], above: list[int]) -> str:
        """Return a polygon as SVG writes it: to the right along the border above, back along that
        below.
        """
        points = []
        for index, size in enumerate(above):
            points.append((self.x(index), self.y(size)))
            points.append((self.x(index + 1), self.y(size)))
        for index, size in reversed(list(enumerate(below))):
            points.append((self.x(index + 1), self.y(size)))
            points.append((self.x(index), self.y(size)))
        return " ".join(f"{across},{up}" for across, up in points)

    def phases(self) -> list[tuple[str, float, float, str]]:
        """Return name and left border of each phase, with place and anchor of its label."""
        found = []
        start = 0
        for phase, group in groupby(self.moments, key=lambda moment: moment.phase):
            end = start + len(list(group))
            # A label at the border ends there: a short last phase has no room around its middle.
            right = _SIZES["width"] - _SIZES["right"]
            if end == len(self.moments) and self.x(start) > right - _LABEL:
                found.append((phase, self.x(start), self.x(end), "end"))
            else:
                found.append((phase, self.x(start), self.x((start + end) / 2), "middle"))
            start = end
        return found

    def figures(self) -> list[tuple[str, list[float]]]:
        """Return name and GiB by part of each moment."""
        found = []
        for moment in self.moments:
            sizes = [moment.parts.get(name, 0) / GIB for name in self.names]
            rounded = [round(size, self.digits + 1) for size in sizes]
            found.append((f"{moment.phase} {moment.module}", rounded))
        return found


def _bars(plan: Plan, picture: _Picture) -> list[tuple[str, str, float, float]]:
    """Return name, color, GiB and percent of each part at the peak."""
    parts = plan.memory.peak.parts
    sizes = {name: parts.get(name, 0) for name in picture.names}
    sizes["allocator overhead"] = plan.overhead
    whole = max(plan.cluster.gpu.memory, plan.needed)
    bars = []
    for name, size in sizes.items():
        if round(size / GIB, picture.digits):
            color = picture.colors.get(name, "#888")
            bars.append((name, color, size / GIB, 100 * size / whole))
    return bars


def _fewer(moments: tuple[Moment, ...]) -> list[Moment]:
    """Return at most `_MOMENTS` of them: the fullest of each group of neighbours."""
    group = -(-len(moments) // _MOMENTS)
    found = []
    for start in range(0, len(moments), group):
        found.append(max(moments[start : start + group], key=lambda moment: moment.total))
    return found
