"""`titanlite runs` and `titanlite compare` on the command line."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from titanlite.runs.attempts import RunError

PICTURE = "comparison.png"
PAGE = "comparison.html"


def add_commands(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds both commands to argparse."""
    runs = commands.add_parser(
        "runs",
        help="list runs and how they are doing",
        description="List the runs below some folders, the newest first: state, step, losses, speed. "
        "A run that says it is running and shows no sign of life has died.",
        allow_abbrev=False,
    )
    runs.add_argument("folders", nargs="*", metavar="FOLDER", type=Path, help="where to look (default: ./outputs)")
    runs.add_argument("--json", action="store_true", help="print a JSON list, one object per run")
    runs.add_argument("--attempts", action="store_true", help="show each run's attempts: how each began and ended")
    runs.set_defaults(run=_runs)

    compare = commands.add_parser(
        "compare",
        help="put runs side by side: speed, memory, losses, what differs",
        description="Print what several runs reached and what differs between them, and draw their curves as "
        f"{PICTURE} (needs the extra `plots`) and {PAGE}, which needs nothing else and opens in any browser.",
        allow_abbrev=False,
    )
    compare.add_argument("runs", nargs="+", metavar="RUN", type=Path, help="a run's folder, or a metrics file")
    compare.add_argument(
        "--out", metavar="FOLDER", type=Path, default=Path("comparison"), help="where to draw (default: ./comparison)"
    )
    compare.add_argument("--json", action="store_true", help="print the figures as one JSON object")
    compare.set_defaults(run=_compare)


def _runs(arguments: argparse.Namespace, flags: Sequence[str], _style: object) -> str:
    from titanlite.runs.list import list_runs, runs_json, runs_text

    _refuse(flags)
    folders = arguments.folders or [Path("outputs")]
    found = list_runs(folders)
    if arguments.attempts:
        return _attempts([run.folder for run in found], arguments.json) or "no attempts were recorded"
    if arguments.json:
        return _json(runs_json(found))
    if not found:
        return f"no runs below {', '.join(map(str, folders))}"
    return runs_text(found, sys.stdout.isatty())


def _attempts(folders: Sequence[Path], as_json: bool) -> str:
    from titanlite.runs.ledger import attempts_text, read_entries

    if as_json:
        return _json({str(folder): read_entries(folder) for folder in folders})
    texts = (attempts_text(folder, sys.stdout.isatty()) for folder in folders)
    return "\n\n".join(text for text in texts if text)


def _compare(arguments: argparse.Namespace, flags: Sequence[str], _style: object) -> str:
    from titanlite.runs.compare import compare, compare_json, compare_text, read_runs
    from titanlite.runs.page import render_page
    from titanlite.runs.plots import PlotsMissing, charts, draw_png

    _refuse(flags)
    comparison = compare(read_runs(arguments.runs))
    drawn = charts(comparison.runs, comparison.labels)
    page, picture = arguments.out / PAGE, arguments.out / PICTURE
    written = [page]
    try:
        arguments.out.mkdir(parents=True, exist_ok=True)
        page.write_text(render_page(comparison, drawn, f"{datetime.now():%Y-%m-%d %H:%M}"), encoding="utf-8")
        draw_png(drawn, picture)
        written.append(picture)
    except PlotsMissing as error:
        print(f"{picture} is not drawn: {error}. {PAGE} has the same curves", file=sys.stderr)
    except OSError as error:
        raise RunError(f"cannot write to {arguments.out}: {error.strerror or error}; name another with --out") from None
    if arguments.json:
        return _json({**compare_json(comparison), "written": [str(path) for path in written]})
    return f"{compare_text(comparison, sys.stdout.isatty())}\n\nwritten: {', '.join(map(str, written))}"


def _refuse(flags: Sequence[str]) -> None:
    if flags:
        raise RunError(f"{flags[0]} is a config key; this command reads what runs have written and takes none")


def _json(value: Any) -> str:
    return json.dumps(value, indent=1, allow_nan=False)
