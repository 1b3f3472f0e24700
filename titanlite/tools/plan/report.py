"""A plan as one HTML file: the memory over a step by part, a bar for each part at the peak; it
fetches nothing.
"""

from __future__ import annotations

from itertools import accumulate, groupby

from titanlite.plan.parts import GIB, PARTS, Moment
from titanlite.plan.plan import Plan
from titanlite.plan.text import plan_rows, verdict
from titanlite.tools import render_page
from titanlite.tools.commands.compare_page import ticks
from titanlite.tools.commands.plots import COLORS

#: Pixels of the picture.
_SIZES = {"width": 960, "height": 420, "top": 14, "bottom": 40, "left": 70, "right": 20}
#: Most moments in the picture; of neighbours beyond that the fullest is shown.
_MOMENTS = 800


def plan_page(plan: Plan) -> str:
    """Return the page."""
    moments = _fewer(plan.memory.moments)
    peak, usable = plan.memory.peak, plan.cluster.gpu.memory
    digits = 2 if peak.total >= GIB else 4
    names = [
        name for name in PARTS if any(round(m.parts.get(name, 0) / GIB, digits) for m in moments)
    ]
    colors = {name: COLORS[i % len(COLORS)] for i, name in enumerate(PARTS)}
    room = usable - plan.overhead
    lines = ticks(0.0, max(room, peak.total) / GIB, 6)
    low = _SIZES["height"] - _SIZES["bottom"]
    across = (_SIZES["width"] - _SIZES["left"] - _SIZES["right"]) / len(moments)

    def y(size: float) -> float:
        return round(low - (low - _SIZES["top"]) * size / GIB / lines[-1], 1)

    def x(moment: float) -> float:
        return round(_SIZES["left"] + across * moment, 1)

    def area(below: list[float], above: list[float]) -> str:
        """Return a polygon as SVG writes it: to the right along the border above, back along that
        below.
        """
        right = [(x(i + side), at) for i, at in enumerate(above) for side in (0, 1)]
        back = [(x(i + side), at) for i, at in reversed(list(enumerate(below))) for side in (1, 0)]
        return " ".join(f"{across},{up}" for across, up in [*right, *back])

    # Each part lies on those before it: the border above part k is the sum of the first k + 1.
    sums = [[0, *accumulate(moment.parts.get(name, 0) for name in names)] for moment in moments]
    borders = [[y(heights[k]) for heights in sums] for k in range(len(names) + 1)]
    areas = [(name, colors[name], area(borders[k], borders[k + 1])) for k, name in enumerate(names)]
    phases, start = [], 0
    for phase, group in groupby(moments, key=lambda moment: moment.phase):
        end = start + len(list(group))
        # A label at the border ends there: a short last phase has no room around its middle.
        edge = end == len(moments) and x(start) > _SIZES["width"] - _SIZES["right"] - 80
        phases.append(
            (phase, x(start), *((x(end), "end") if edge else (x((start + end) / 2), "middle")))
        )
        start = end
    sizes = {
        **{name: peak.parts.get(name, 0) for name in names},
        "allocator overhead": plan.overhead,
    }
    sizes = {name: size for name, size in sizes.items() if round(size / GIB, digits)}
    highest = max(range(len(moments)), key=lambda i: moments[i].total)
    whole = max(usable, plan.needed)
    bars = [
        (name, colors.get(name, "#888"), size / GIB, 100 * size / whole)
        for name, size in sizes.items()
    ]
    return render_page(
        "plan.html.jinja",
        **_SIZES,
        plan=plan,
        verdict=verdict(plan),
        rows=list(plan_rows(plan)),
        areas=areas,
        lines=[(f"{value:,.10g}", y(value * GIB)) for value in lines],
        phases=phases,
        room=(f"{room / GIB:.1f} GiB for tensors", y(room)),
        top_of_step=(f"peak {peak.total / GIB:.{digits}f} GiB", x(highest + 0.5), y(peak.total)),
        digits=digits,
        bars=bars,
        gib=GIB,
        data={
            "across": across,
            "moments": [
                (
                    f"{m.phase} {m.module}",
                    [round(m.parts.get(name, 0) / GIB, digits + 1) for name in names],
                )
                for m in moments
            ],
        },
    )


def _fewer(moments: tuple[Moment, ...]) -> list[Moment]:
    """Return at most `_MOMENTS` of them: the fullest of each group of neighbours."""
    group = -(-len(moments) // _MOMENTS)
    return [
        max(moments[i : i + group], key=lambda m: m.total) for i in range(0, len(moments), group)
    ]
