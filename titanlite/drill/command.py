"""`titanlite drill` on the command line."""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from titanlite import exit_codes
from titanlite.config.errors import ConfigError, Problem
from titanlite.config.load import find_config, read
from titanlite.drill.faults import REHEARSALS, Rehearsal, chosen
from titanlite.drill.ranks import RanksError, prepare
from titanlite.drill.shrink import Toy, shrink
from titanlite.drill.stage import Failed, Stage
from titanlite.drill.text import write_text
from titanlite.tools.processes import Stopped, stoppable
from titanlite.utils import Style, escape

_DESCRIPTION = """\
Rehearse what may happen to a run: kills, damaged checkpoints, full disks, signals, a gradient that is not a number, a
loader that raises or hangs.
CONFIG is trained at toy size (small layers, 8 steps, the bundled text) with its own features and kinds of parallelism,
on CPU processes in a temporary folder; each fault strikes such a run, and what comes of it is compared bit for bit with
a run that nothing happened to, or, where a fault must leave a trace, with what it must leave."""

_EPILOG = """\
examples:
  titanlite drill llama3_8b.toml
  titanlite drill my.toml --ranks 4 --training.tensor_parallel_degree 2
  titanlite drill my.toml --only sigterm --only full-disk

Any further --section.key VALUE is laid over the file, as for train.py. Exit status: 0 when all went as it must, 1 when
something did not (the folders of the runs are then kept), 2 when the config is wrong, 130 after Ctrl-C."""


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the command to argparse."""
    parser = commands.add_parser(
        "drill",
        help="rehearse kills, damage, signals and other faults on a small copy of a config",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("config", nargs="?", metavar="CONFIG", help="TOML file; also looked up in train_configs/")
    parser.add_argument(
        "--ranks", type=int, metavar="N", help="processes (default: 2, or 4 where two kinds of parallelism are on)"
    )
    parser.add_argument(
        "--only", action="append", default=[], metavar="NAME", help="only this fault; may be given several times"
    )
    parser.add_argument("--list", action="store_true", help="name the faults and end")
    parser.add_argument("--compile", action="store_true", help="leave training.compile as it is in CONFIG: slow")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace, flags: list[str], style: Style) -> tuple[str, int]:
    if arguments.list:
        width = max(len(rehearsal.name) for rehearsal in REHEARSALS)
        return "\n".join(f"{r.name:<{width}}  {r.about}" for r in REHEARSALS), exit_codes.DONE
    folder = Path(tempfile.mkdtemp(prefix="titanlite-drill-"))
    try:
        toy = _toy(arguments, flags, write_text(folder))
        wanted = _wanted(arguments.only, toy.ranks)
    except ConfigError:
        shutil.rmtree(folder)
        raise
    for line in toy.notes:
        _say(f"  {line}")
    results: list[dict[str, Any]] = []
    code = exit_codes.ERROR
    with stoppable():
        try:
            code = _play(Stage(toy, folder), wanted, results, style)
        except Stopped as stop:
            _say(f"stopped by {stop}")
            code = 128 + stop.number
    kept = code == exit_codes.ERROR
    if kept:
        _say(f"the runs, with all they printed in console.log: {folder}")
    else:
        shutil.rmtree(folder, ignore_errors=True)
    passed = sum(result["passed"] for result in results)
    if arguments.json:
        record = {"config": arguments.config, "ranks": toy.ranks, "passed": code == exit_codes.DONE, "faults": results}
        return json.dumps({**record, "kept": str(folder) if kept else None}, indent=1), code
    return f"{passed} of {len(wanted)} as it must be", code


def _toy(arguments: argparse.Namespace, flags: Sequence[str], text: Path) -> Toy:
    """Raises ConfigError."""
    if arguments.config is None:
        raise ConfigError([Problem("command line", "CONFIG", "name a TOML file", "or --list for the faults")])
    if arguments.ranks is not None and arguments.ranks < 1:
        raise ConfigError([Problem("command line", "--ranks", f"expected an integer >= 1, got {arguments.ranks}")])
    found = find_config(arguments.config)
    if found is None:
        raise ConfigError(read([f"--job.config_file={arguments.config}"])[1])
    return shrink(str(found.resolve()), flags, text, arguments.ranks, arguments.compile)


def _wanted(only: Sequence[str], ranks: int) -> list[Rehearsal]:
    """Raises ConfigError for a name that is none, and for a fault that needs more ranks."""
    known = {rehearsal.name: rehearsal for rehearsal in REHEARSALS}
    problems = [
        Problem("command line", "--only", f"there is no fault {name!r}", f"there are {', '.join(known)}")
        for name in only
        if name not in known
    ]
    problems += [
        Problem("command line", "--only", f"{name} needs {known[name].least_ranks} ranks, there is {ranks}")
        for name in only
        if name in known and ranks < known[name].least_ranks
    ]
    if problems:
        raise ConfigError(problems)
    return chosen(only, ranks)


def _play(stage: Stage, wanted: Sequence[Rehearsal], results: list[dict[str, Any]], style: Style) -> int:
    """All rehearsals in turn, told and added to `results` as they end; the exit code."""
    began = time.monotonic()
    prepare()
    width = max(len(rehearsal.name) for rehearsal in REHEARSALS)
    try:
        stage.make_reference()
    except (Failed, RanksError) as problem:
        _say(f"{style.warn('FAIL')}    the run without harm: {problem}")
        return exit_codes.ERROR
    _say(f"        {'(no harm)':<{width}}  {time.monotonic() - began:5.1f} s  the run to compare with")
    for rehearsal in wanted:
        began = time.monotonic()
        passed, line = _played(rehearsal, stage)
        seconds = time.monotonic() - began
        word = style.good("pass") if passed else style.warn("FAIL")
        _say(f"{word}    {rehearsal.name:<{width}}  {seconds:5.1f} s  {line}")
        results.append({"name": rehearsal.name, "passed": passed, "seconds": round(seconds, 2), "told": line})
    return exit_codes.DONE if all(result["passed"] for result in results) else exit_codes.ERROR


def _played(rehearsal: Rehearsal, stage: Stage) -> tuple[bool, str]:
    """Whether all went as it must, and the line that tells what happened or what was wrong."""
    try:
        return True, rehearsal.play(stage)
    except (Failed, RanksError) as problem:
        return False, str(problem)
    except Exception as problem:  # what a run left is not as it must be, in a way that nobody thought of
        return False, repr(problem)


def _say(text: str) -> None:
    """Progress, on standard error: standard output is the result's."""
    print(escape(text), file=sys.stderr, flush=True)
