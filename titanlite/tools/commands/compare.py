"""`titanlite compare`: the figures of several runs as tables, as a page and as a picture."""

from __future__ import annotations

import argparse
from datetime import datetime
from pathlib import Path

from titanlite.runs.read import RunError
from titanlite.tools.commands.comparison import compare, compare_json, read_runs, tables
from titanlite.tools.commands.runs import to_json
from titanlite.tools.parser import Commands, new_command
from titanlite.utils import atomic_write, escape_name, render, say

PICTURE = "comparison.png"
PAGE = "comparison.html"


def add_command(commands: Commands) -> None:
    """Add `compare` to argparse."""
    compare = new_command(
        commands,
        _run,
        "compare",
        "put runs side by side: speed, memory, losses, what differs",
        "Print the figures of several runs and the differences between them, and "
        f"draw their curves as {PAGE}, which opens in any browser. Where matplotlib "
        f"is installed (the extra `plots`), also as {PICTURE}.",
    )
    compare.add("runs", "a run's folder, or a metrics file", "RUN", nargs="+", type=Path)
    compare.add(
        "--out",
        "where to draw (default: ./comparison)",
        "FOLDER",
        type=Path,
        default=Path("comparison"),
    )
    compare.add("--png", f"fail where {PICTURE} cannot be drawn")
    compare.add("--json", "print the figures as one JSON object")


def _run(arguments: argparse.Namespace) -> str:
    from titanlite.tools.commands.compare_page import comparison_page
    from titanlite.tools.commands.plots import PlotsMissing, charts, draw_png

    comparison = compare(read_runs(arguments.runs))
    drawn = charts(comparison.runs, comparison.labels)
    page = arguments.out / PAGE
    picture = arguments.out / PICTURE
    written = [page]
    try:
        arguments.out.mkdir(parents=True, exist_ok=True)
        atomic_write(page, comparison_page(comparison, drawn, f"{datetime.now():%Y-%m-%d %H:%M}"))
        draw_png(drawn, picture)
        written.append(picture)
    except PlotsMissing as error:
        if arguments.png:
            raise RunError(f"{picture} is not drawn: {error}. {page} has the same curves") from None
    except OSError as error:
        raise RunError(
            f"cannot write to {arguments.out}: {error.strerror or error}; name another with --out"
        ) from None
    for problem in dict.fromkeys(problem for run in comparison.runs for problem in run.problems):
        say(f"note: {escape_name(problem)}")
    if arguments.json:
        return to_json({**compare_json(comparison), "written": [str(path) for path in written]})
    parts = list(map(render, tables(comparison)))
    if comparison.notes:
        parts.append("\n".join(f"note: {escape_name(note)}" for note in comparison.notes))
    return "\n\n".join([*parts, f"written: {', '.join(map(str, written))}"])
