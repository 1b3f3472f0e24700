#!/usr/bin/env python
"""Draw the rooms of the library and the imports between them: docs/images/rooms.svg.

usage: python scripts/rooms_picture.py docs/images/rooms.svg

A room stands above all rooms that it imports. Of the imports the picture shows those that no longer
way implies. A test compares the picture with the imports of today.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from dataclasses import dataclass
from html import escape
from pathlib import Path

import house

#: Purpose of each room. A row of the picture keeps this order.
CAPTIONS = {
    "contrib": "what stands beside the core",
    "cli": "the commands",
    "main": "the process of a rank",
    "assembly": "config → parts of a run",
    "trainer": "the loop",
    "features": "what a run switches on",
    "resolve": "files → checked config",
    "metrics": "figures, watchdog, trackers",
    "validation": "held-out losses",
    "launch": "jobs for clusters",
    "checkpoint": "saves and loads",
    "step": "one training step",
    "plan": "memory, time, disk",
    "parallel": "a model over ranks",
    "run": "the resolved config",
    "regularized_loss": "smoothing, z-loss",
    "models": "the families",
    "optim": "updates, schedule, guard",
    "loss": "over all tokens of all ranks",
    "data": "files → sequences → batches",
    "torchrun": "codes of its workers",
    "runs": "a run's folder",
    "callbacks": "their interface",
    "dist": "process group, signals",
    "config": "keys, layers, trust",
    "doors": "names of what is beside",
    "exit_codes": "codes of errors",
    "utils": "logger, atomic files",
}
#: The way of a run: from its file to its steps.
WAY = ("config", "resolve", "run", "assembly", "trainer", "step")
LEFT_OUT = ("__init__", "__main__")

#: Pixels of a row and of the column that a box of a full row has.
ROW, COLUMN = 62, 184
BOX = (172, 38)
STYLE = """
  .room { fill: #f6f8fa; stroke: #8c959f; }
  .way { fill: #ddf4ff; stroke: #0969da; }
  .edge { stroke: #afb8c1; fill: none; }
  .name { font: 600 13px monospace; fill: #1f2328; }
  .caption { font: 11px sans-serif; fill: #59636e; }
  @media (prefers-color-scheme: dark) {
    .room { fill: #151b23; stroke: #656c76; }
    .way { fill: #0c2d6b; stroke: #4493f8; }
    .edge { stroke: #4a525c; }
    .name { fill: #f0f6fc; }
    .caption { fill: #9198a1; }
  }
"""


@dataclass(frozen=True)
class Place:
    """The middle of a room's box, in pixels."""

    x: float
    y: float


def main() -> None:
    repository = Path(__file__).resolve().parents[1]
    Path(sys.argv[1]).write_text(picture(repository), encoding="utf-8")


def picture(repository: Path) -> str:
    """Return the SVG of the rooms of a repository."""
    edges = {name: set[str]() for name in CAPTIONS}
    for own, other in house.rooms_imported(house.Source(repository)):
        if own not in LEFT_OUT and other not in LEFT_OUT:
            edges[own].add(other)
    rows = rows_of(edges)
    width = COLUMN * max(len(names) for names in rows)
    places = places_of(rows, width)
    lines = [line(places[upper], places[lower]) for upper, lower in shown(edges)]
    boxes = [box(name, place) for name, place in places.items()]
    height = ROW * len(rows)
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" '
        'aria-label="Rooms of titanlite: each stands above those that it imports">'
    )
    return "\n".join([head, f"<style>{STYLE}</style>", *lines, *boxes, "</svg>\n"])


def rows_of(edges: dict[str, set[str]]) -> list[list[str]]:
    """Return the rooms by rows from the top. A room's row is above those of all that it imports."""
    heights: dict[str, int] = {}

    def height(name: str) -> int:
        if name not in heights:
            heights[name] = 1 + max((height(other) for other in edges[name]), default=-1)
        return heights[name]

    rows: dict[int, list[str]] = defaultdict(list)
    for name in CAPTIONS:
        rows[height(name)].append(name)
    return [rows[number] for number in sorted(rows, reverse=True)]


def places_of(rows: list[list[str]], width: float) -> dict[str, Place]:
    places = {}
    for number, names in enumerate(rows):
        for column, name in enumerate(names):
            x = width * (column + 0.5) / len(names)
            places[name] = Place(x, ROW * (number + 0.5))
    return places


def shown(edges: dict[str, set[str]]) -> list[tuple[str, str]]:
    """Return the imports between rooms that no way over a third room implies."""
    direct = {name: set(others) for name, others in edges.items()}
    return [
        (name, other)
        for name in edges
        for other in sorted(edges[name])
        if not any(other in house.reachable(direct, third) for third in edges[name] - {other})
    ]


def line(upper: Place, lower: Place) -> str:
    top, bottom = upper.y + BOX[1] / 2, lower.y - BOX[1] / 2
    middle = (top + bottom) / 2
    return (
        f'<path class="edge" d="M{upper.x:.0f} {top:.0f} C{upper.x:.0f} {middle:.0f} '
        f'{lower.x:.0f} {middle:.0f} {lower.x:.0f} {bottom:.0f}"/>'
    )


def box(name: str, place: Place) -> str:
    width, height = BOX
    kind = "room way" if name in WAY else "room"
    number = f"{WAY.index(name) + 1} " if name in WAY else ""
    return (
        f'<rect class="{kind}" x="{place.x - width / 2:.0f}" y="{place.y - height / 2:.0f}" '
        f'width="{width}" height="{height}" rx="5"/>'
        f'<text class="name" text-anchor="middle" x="{place.x:.0f}" y="{place.y - 3:.0f}">'
        f"{number}{name}</text>"
        f'<text class="caption" text-anchor="middle" x="{place.x:.0f}" y="{place.y + 12:.0f}">'
        f"{escape(CAPTIONS[name])}</text>"
    )


if __name__ == "__main__":
    main()
