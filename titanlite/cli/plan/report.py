"""A plan as one HTML file: the memory over a step, and a bar for each part at the peak.

Memory is shown by part. The page fetches nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from itertools import accumulate, groupby

from titanlite.cli import render_page
from titanlite.cli.pictures import COLORS, Axis, Frame, ticks
from titanlite.plan.parts import GIB, PARTS, Moment
from titanlite.plan.plan import Plan
from titanlite.plan.text import plan_rows, verdict

_FRAME = Frame(width=960, height=420, top=14, bottom=40, left=70, right=20)
#: Most moments in the picture; of neighbours beyond that the fullest is shown.
_MOMENTS = 800


def plan_page(plan: Plan) -> str:
    """Return the page."""
    moments = _fewer(plan.memory.moments)
    peak = plan.memory.peak
    digits = 2 if peak.total >= GIB else 4
    names = [name for name in PARTS if any(_is_seen(m.parts.get(name, 0), digits) for m in moments)]
    room = plan.cluster.gpu.memory - plan.overhead
    up = _FRAME.up(ticks(0.0, max(room, peak.total) / GIB, 6))
    across = _FRAME.across([0, len(moments)])
    fullest = max(range(len(moments)), key=lambda number: moments[number].total)
    texts = []
    for moment in moments:
        sizes = [round(moment.parts.get(name, 0) / GIB, digits + 1) for name in names]
        texts.append((f"{moment.phase} {moment.module}", sizes))
    return render_page(
        "plan.html.jinja",
        **asdict(_FRAME),
        plan=plan,
        verdict=verdict(plan),
        rows=list(plan_rows(plan)),
        areas=_areas(moments, names, across, up),
        lines=up.lines(),
        phases=_phases(moments, across),
        room=(f"{room / GIB:.1f} GiB for tensors", up.place(room / GIB)),
        top_of_step=(
            f"peak {peak.total / GIB:.{digits}f} GiB",
            across.place(fullest + 0.5),
            up.place(peak.total / GIB),
        ),
        digits=digits,
        bars=_bars(plan, names, digits),
        gib=GIB,
        data={"across": across.pixels, "moments": texts},
    )


def _is_seen(size: float, digits: int) -> bool:
    """Return whether a size in bytes is not 0 as the page writes it."""
    return round(size / GIB, digits) != 0


def _color(name: str) -> str:
    return COLORS[list(PARTS).index(name) % len(COLORS)]


def _areas(
    moments: Sequence[Moment], names: Sequence[str], across: Axis, up: Axis
) -> list[tuple[str, str, str]]:
    """Return name, colour and polygon of each part; it lies on the parts before it."""
    sums = [[0, *accumulate(moment.parts.get(name, 0) for name in names)] for moment in moments]
    areas = []
    for number, name in enumerate(names):
        below = [up.place(heights[number] / GIB) for heights in sums]
        above = [up.place(heights[number + 1] / GIB) for heights in sums]
        areas.append((name, _color(name), _polygon(below, above, across)))
    return areas


def _polygon(below: Sequence[float], above: Sequence[float], across: Axis) -> str:
    """Return a polygon as SVG writes it: to the right along the border above, back along that
    below.

    below, above: the pixel of each moment.
    """
    right = []
    back = []
    for number, (low, high) in enumerate(zip(below, above, strict=True)):
        start = across.place(number)
        end = across.place(number + 1)
        right += [f"{start},{high}", f"{end},{high}"]
        back += [f"{start},{low}", f"{end},{low}"]
    return " ".join([*right, *reversed(back)])


def _phases(moments: Sequence[Moment], across: Axis) -> list[tuple[str, float, float, str]]:
    """Return each phase of the step: its name, its start, the place of its label, and what of the
    label is there.
    """
    phases = []
    start = 0
    for phase, group in groupby(moments, key=lambda moment: moment.phase):
        end = start + len(list(group))
        left = across.place(start)
        # A short last phase has no room around its middle: its label ends at the border.
        is_at_edge = end == len(moments) and left > _FRAME.width - _FRAME.right - 80
        if is_at_edge:
            phases.append((phase, left, across.place(end), "end"))
        else:
            phases.append((phase, left, across.place((start + end) / 2), "middle"))
        start = end
    return phases


def _bars(plan: Plan, names: Sequence[str], digits: int) -> list[tuple[str, str, float, float]]:
    """Return name, colour, GiB and percent of each part at the peak."""
    whole = max(plan.cluster.gpu.memory, plan.needed)
    bars = []
    for name in names:
        size = plan.memory.peak.parts.get(name, 0)
        if _is_seen(size, digits):
            bars.append((name, _color(name), size / GIB, 100 * size / whole))
    if _is_seen(plan.overhead, digits):
        share = 100 * plan.overhead / whole
        bars.append(("allocator overhead", "#888", plan.overhead / GIB, share))
    return bars


def _fewer(moments: tuple[Moment, ...]) -> list[Moment]:
    """Return at most `_MOMENTS` of them: the fullest of each group of neighbours."""
    group = -(-len(moments) // _MOMENTS)
    return [
        max(moments[i : i + group], key=lambda m: m.total) for i in range(0, len(moments), group)
    ]
