"""`titanlite sweep`: train a config at each point of its table [sweep], and compare the losses.

[sweep]
"optimizer.lr" = [1e-3, 3e-3]       # a grid: all combinations of the lists

[[sweep.points]]                    # or a list: keys that change together
"model.overrides.dim" = 256
"model.overrides.n_heads" = 4
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import math
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from titanlite import exit_codes
from titanlite.cli import at_least
from titanlite.cli.argument_parser import FLAGS, Commands, add_files, files_of, new_command
from titanlite.cli.run_figures import to_json
from titanlite.config.aliases import is_subsection, key_of
from titanlite.config.errors import ConfigError, Problem, refuse, unfit
from titanlite.config.load import read
from titanlite.config.raw_values import Entry
from titanlite.config.toml import join, quote, quote_key
from titanlite.contrib.lab import refuse_keys
from titanlite.contrib.lab.members import Member, MemberResult, check_members, run_members
from titanlite.runs.record import CONFIG
from titanlite.runs.text_tables import Table, render
from titanlite.utils import atomic_write, public, public_tree

RESULTS = "results.json"
#: Keys that would take a run out of its folder, or change its files.
_FIXED = {"job.dump_folder", "job.config_file", "job.extends", "job.dialect"}
_LONGEST_NAME = 120
_EPILOG = f"""{FLAGS} Exit status: 0 when each run is done or diverged, 1 when one failed or none is
done, 2 for a wrong config, 4 where another sweep runs in the folder, 130 after Ctrl-C. Ranges,
runs at a time and job arrays: docs/sweep.md"""

Values = Mapping[str, Any]


def add_command(commands: Commands) -> None:
    """Add `titanlite sweep` to argparse."""
    parser = new_command(
        commands,
        _run,
        "sweep",
        "train a config at several learning rates, or other values, and compare the losses",
        "Train a config at each point of its table [sweep], one run after the other, each in its "
        "own folder. All points are checked first. The same command goes on after a stop, and "
        "passes over finished runs. At the end it prints a table of the losses.",
        _EPILOG,
    )
    add_files(parser)
    parser.add("--nproc-per-node", "ranks of each run (default: 1)", "N", type=at_least(1))
    folder = "folder of the sweep (default: job.dump_folder with -sweep behind it)"
    parser.add("--folder", folder, "FOLDER", type=Path)
    parser.add("--dry-run", "check the points and print their names; run nothing")


def _run(arguments: argparse.Namespace) -> tuple[str, int]:
    config_args = [*files_of(arguments), *arguments.flags]
    config, problems = read(config_args, defer=True)
    refuse(problems)
    if config.sweep is None:
        hint = '[sweep]\n    "optimizer.lr" = [1e-3, 3e-3]'
        raise unfit("[sweep]", "there is no such table", hint)
    points = points_of(config.sweep)
    members = members_of(points)
    varied = {key_of(name) for point in points for name in point}
    refuse_keys(arguments.flags, dict.fromkeys(varied, "the table [sweep] varies it"))
    dump_folder = Path(config.value("job.dump_folder"))
    folder = arguments.folder or dump_folder.with_name(f"{dump_folder.name}-sweep")
    ranks = arguments.nproc_per_node or 1
    if arguments.dry_run:
        check_members(members, config_args, folder, ranks)
        return "\n".join(str(folder / member.name) for member in members), exit_codes.DONE
    results = run_members(members, config_args, folder, ranks)
    return report(labelled(points), results, folder)


def points_of(table: Entry) -> list[Values]:
    """Return the points of a table [sweep]: each of `points` with all combinations of the lists.

    Raises ConfigError.
    """
    lists = dict(_flat(table.value))
    for name, value in lists.items():
        if not isinstance(value, list) or not value:
            raise _error(table, name, f"expected a list of values, got {quote(value)}")
    given = lists.pop("points", [{}])
    if not all(isinstance(point, dict) for point in given):
        raise _error(table, "points", "expected tables, each below a line [[sweep.points]]")
    together = [dict(_flat(point)) for point in given]
    in_points = {key_of(name) for point in together for name in point}
    alone = set(map(key_of, lists))
    for key in in_points & alone:
        raise _error(table, key, "is varied twice: by itself and in points")
    for key in (in_points | alone) & _FIXED:
        raise _error(table, key, "cannot vary", "each run has its own folder below --folder")
    points: list[Values] = []
    for point in together:
        for chosen in itertools.product(*lists.values()):
            points.append({**point, **dict(zip(lists, chosen, strict=True))})
    if not all(points):
        raise _error(table, "", "a point sets no key", 'as "optimizer.lr" = [1e-3]')
    return points


def _error(table: Entry, name: str, message: str, hint: str = "") -> ConfigError:
    key = f"[sweep] {name}".rstrip()
    place = table.place(f".{quote_key(name)}")
    return ConfigError([Problem("does-not-fit", key, message, hint, place)])


def _flat(table: Values, path: str = "") -> Iterator[tuple[str, Any]]:
    """`optimizer.lr = …` without quotes is a table in a table."""
    for part, value in table.items():
        name = join(path, part) if path else part
        if isinstance(value, dict) and is_subsection(name):
            yield from _flat(value, name)
        else:
            yield name, value


def members_of(points: Sequence[Values]) -> list[Member]:
    """Return the run of each point, named by its values. Raises ConfigError for one given twice."""
    found: dict[str, Member] = {}
    for point, values in zip(points, labelled(points), strict=True):
        text = ",".join(f"{label}={shown(value)}" for label, value in values.items())
        name = re.sub(r"[^A-Za-z0-9._=+,-]+", "_", public(text))[:_LONGEST_NAME]
        if name != text:
            name += "-" + hashlib.sha256(text.encode()).hexdigest()[:8]
        # Some file systems do not distinguish the cases of letters.
        if name.lower() in found:
            raise unfit("[sweep]", f"the point {name} is given twice")
        flags = [f"--{key}={v if isinstance(v, str) else quote(v)}" for key, v in point.items()]
        found[name.lower()] = Member(name, flags)
    return list(found.values())


def labelled(points: Sequence[Values]) -> list[Values]:
    """Return the values by the last part of each key, or by the whole key where two share it."""
    keys = dict.fromkeys(key_of(name) for point in points for name in point)
    last = [key.rpartition(".")[2] for key in keys]
    labels = {}
    for key, part in zip(keys, last, strict=True):
        labels[key] = part if last.count(part) == 1 else key
    return [{labels[key_of(name)]: value for name, value in point.items()} for point in points]


def report(
    points: Sequence[Values], results: Sequence[MemberResult], folder: Path
) -> tuple[str, int]:
    """Write the results of a sweep; return their table, the lowest loss first, and the exit code.

    points: by the names that the table shows.
    """
    rows = sorted(
        zip(points, results, strict=True),
        key=lambda row: (row[1].state != "done", row[1].loss or math.inf),
    )
    runs = []
    lines = []
    notes = []
    labels = list(dict.fromkeys(label for point in points for label in point))
    for point, result in rows:
        runs.append({**asdict(result), "values": dict(point)})
        values = [shown(point[label]) if label in point else "–" for label in labels]
        loss = "–" if result.loss is None else f"{result.loss:.4f}"
        lines.append([*values, loss, result.state])
        if result.reason:
            notes.append(f"{result.name} {result.state}: {result.reason}")
    atomic_write(folder / RESULTS, to_json(public_tree({"runs": runs})) + "\n")
    best = rows[0][1]
    if best.state == "done":
        file = shlex.quote(str(folder / best.name / CONFIG))
        notes.append(f"best: titanlite train {file} --job.dump_folder=FOLDER")
    is_whole = best.state == "done" and all(result.is_final for result in results)
    table = render(Table([*labels, "loss", "state"], lines, left=(len(labels) + 1,)))
    return "\n".join([table, "", *notes]), exit_codes.DONE if is_whole else exit_codes.ERROR


def shown(value: Any) -> str:
    """Return a text without quotes, a float as short as it can be."""
    if isinstance(value, str):
        return value
    if isinstance(value, float) and float(f"{value:g}") == value:
        return f"{value:g}"
    return quote(value)
