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
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from titanlite import exit_codes
from titanlite.cli import at_least, refuse_keys
from titanlite.cli.parser import FLAGS, Commands, add_files, files_of, new_command
from titanlite.cli.pictures import Chart, Curve, draw
from titanlite.cli.processes import Stopped
from titanlite.cli.run_figures import to_json
from titanlite.config.aliases import is_subsection, key_of
from titanlite.config.entries import Entry
from titanlite.config.errors import Problem, refuse, unfit
from titanlite.config.load import read
from titanlite.config.toml import join, quote, quote_key
from titanlite.contrib.lab.members import (
    Member,
    MemberError,
    MemberResult,
    check_members,
    run_members,
)
from titanlite.runs.record import CONFIG
from titanlite.utils import (
    Table,
    atomic_write,
    human_count,
    human_time,
    public,
    public_tree,
    render,
)

RESULTS = "results.json"
PICTURE = "sweep.svg"
#: Keys that would take a run out of its folder, or change its files.
_FIXED = ("job.dump_folder", "job.config_file", "job.extends", "job.dialect")
_LONGEST_NAME = 120
#: A loss so many times as far above the best as the median is stands at the upper edge.
_FAR = 8.0
#: Values whose ends have this ratio get a logarithmic axis.
_WIDE = 5.0
_EPILOG = f"""{FLAGS} Exit status: 0 when each run is done or diverged, 1 when one failed or none is
done, 2 for a wrong config, 4 where another sweep runs in the folder, 130 after Ctrl-C. Ranges,
runs at a time and job arrays: docs/sweep.md"""

Values = Mapping[str, Any]


@dataclass(frozen=True)
class Row:
    """A run of the sweep. values: by the names that tables show. loss: None where it has none."""

    values: Values
    result: MemberResult
    loss: float | None


def add_command(commands: Commands) -> None:
    """Add `titanlite sweep` to argparse."""
    parser = new_command(
        commands,
        _run,
        "sweep",
        "train a config at several learning rates, or other values, and compare the losses",
        "Train a config at each point of its table [sweep], one run after the other, each in its "
        "own folder. All points are checked first. The same command goes on after a stop, and "
        "passes over finished runs. At the end it prints a table and writes it with a picture.",
        _EPILOG,
    )
    add_files(parser)
    parser.add("--nproc-per-node", "ranks of each run (default: 1)", "N", type=at_least(1))
    folder = "folder of the sweep (default: job.dump_folder with -sweep behind it)"
    parser.add("--folder", folder, "FOLDER", type=Path)
    parser.add("--dry-run", "check the points and print their names; run nothing")
    parser.add("--json", "print the results as JSON")


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
    try:
        results = run_members(members, config_args, folder, ranks)
        return report(points, results, folder, arguments.json)
    except Stopped as stop:
        return "", exit_codes.after_signal(stop.number)
    except OSError as error:
        raise MemberError(f"cannot write to {folder}: {error.strerror or error}") from None


def points_of(table: Entry) -> list[Values]:
    """Return the points of a table [sweep]: each of `points` with all combinations of the lists.

    Raises ConfigError with all that is wrong in the table.
    """
    lists = dict(_flat(table.value))
    wrong = {name: _what_is_wrong(name, value) for name, value in lists.items()}
    refuse([_problem(table, name, *found) for name, found in wrong.items() if found])
    together = [dict(_flat(point)) for point in lists.pop("points", [{}])]
    in_points = {key_of(name) for point in together for name in point}
    problems = []
    for key in [key_of(name) for name in lists]:
        if key in in_points:
            problems.append(_problem(table, key, "is varied twice: by itself and in points"))
    for key in sorted(in_points.union(map(key_of, lists)).intersection(_FIXED)):
        hint = "each run has its own folder below --folder"
        problems.append(_problem(table, key, "cannot vary", hint))
    points: list[Values] = []
    for point in together:
        for chosen in itertools.product(*lists.values()):
            points.append({**point, **dict(zip(lists, chosen, strict=True))})
    if not all(points):
        problems.append(_problem(table, "", "a point sets no key", 'as "optimizer.lr" = [1e-3]'))
    refuse(problems)
    return points


def _problem(table: Entry, name: str, message: str, hint: str = "") -> Problem:
    key = f"[sweep] {name}".rstrip()
    return Problem("does-not-fit", key, message, hint, table.place(f".{quote_key(name)}"))


def _what_is_wrong(name: str, value: Any) -> tuple[str, str] | None:
    """Return what is wrong with an entry of [sweep], and what to do; None: nothing."""
    if name == "metric":
        return "is gone", "leave it out: the table has the validation or else the training loss"
    if isinstance(value, dict) and {"log", "linear"} & set(value):
        return "ranges are gone", "write the values as a list, as [1e-3, 3e-3, 1e-2]"
    if not isinstance(value, list) or not value:
        return f"expected a list of values, got {quote(value)}", ""
    if name == "points" and not all(isinstance(point, dict) for point in value):
        return "expected tables, each below a line [[sweep.points]]", ""
    return None


def _flat(table: Values, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield names and values; `optimizer.lr = …` without quotes is a table in a table."""
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
    points: Sequence[Values], results: Sequence[MemberResult], folder: Path, as_json: bool
) -> tuple[str, int]:
    """Write the files of a sweep; return its table, the lowest loss first, and the exit code."""
    done = [result for result in results if result.state == "done"]
    is_validated = all(result.validation_loss is not None for result in done)
    metric = "validation_loss" if is_validated else "training_loss"
    rows = []
    for values, result in zip(labelled(points), results, strict=True):
        loss = getattr(result, metric) if result.state == "done" else None
        rows.append(Row(values, result, loss))
    rows.sort(key=lambda row: math.inf if row.loss is None else row.loss)
    code = exit_codes.ERROR
    if done and all(result.is_final for result in results):
        code = exit_codes.DONE
    runs = [{**asdict(row.result), "loss": row.loss, "values": dict(row.values)} for row in rows]
    text = to_json(public_tree({"metric": metric, "runs": runs}))
    atomic_write(folder / RESULTS, text + "\n")
    written = [folder / RESULTS]
    if drawn := picture(f"{folder.name}: {metric.replace('_', ' ')}", rows):
        atomic_write(folder / PICTURE, public(drawn))
        written.append(folder / PICTURE)
    if as_json:
        return text, code
    lines = [render(table(rows, metric)), ""]
    for row in rows:
        if row.result.reason:
            lines.append(f"{row.result.name} {row.result.state}: {row.result.reason}")
    if done:
        best = shlex.quote(str(folder / rows[0].result.name / CONFIG))
        lines.append(f"best: titanlite train {best} --job.dump_folder=FOLDER")
    return "\n".join([*lines, f"written: {', '.join(map(str, written))}"]), code


def table(rows: Sequence[Row], metric: str) -> Table:
    """Return a line for each run. metric: the name of its loss."""
    labels = list(dict.fromkeys(label for row in rows for label in row.values))
    lines = []
    for row in rows:
        values = [shown(row.values[label]) if label in row.values else "–" for label in labels]
        loss = "–" if row.loss is None else f"{row.loss:.4f}"
        result = row.result
        figures = [human_count(result.tokens), human_time(result.seconds)]
        lines.append([*values, loss, *figures, result.state])
    columns = [*labels, metric.replace("_", " "), "tokens", "time", "state"]
    return Table(columns, lines, left=(len(columns) - 1,))


def shown(value: Any) -> str:
    """Return a value for people: a text without quotes, a float as short as it can be."""
    if isinstance(value, str):
        return value
    if isinstance(value, float) and float(f"{value:g}") == value:
        return f"{value:g}"
    return quote(value)


def _varying_numbers(rows: Sequence[Row]) -> list[str]:
    numbers = []
    for label in rows[0].values:
        found = [row.values.get(label) for row in rows]
        if all(type(value) in (int, float) for value in found) and len(set(found)) > 1:
            numbers.append(label)
    return numbers


def picture(title: str, rows: Sequence[Row]) -> str | None:
    """Return the losses over the learning rate, else over the first number that varies, as SVG.

    It has a line for each set of the other values. None: no number varies, or no run has a loss.
    """
    numbers = _varying_numbers(rows)
    losses = [row.loss for row in rows if row.loss is not None]
    if not numbers or not losses:
        return None
    key = max(numbers, key=lambda label: label.endswith("lr"))
    far = min(losses) + _FAR * (statistics.median(losses) - min(losses))
    top = max(loss for loss in losses if loss <= far)
    lines: dict[str, list[tuple[float, float]]] = {}
    failed = []
    for row in sorted(rows, key=lambda row: float(row.values[key])):
        others = [f"{name} = {shown(value)}" for name, value in row.values.items() if name != key]
        line = lines.setdefault(", ".join(others) or key, [])
        if row.loss is None:
            failed.append((row.values[key], top))
        else:
            line.append((row.values[key], min(row.loss, top)))
    curves = []
    for color, (label, points) in enumerate(lines.items()):
        curves.append(Curve(label, points, color, mark="dot"))
    if failed:
        label = "diverged or failed; the upper edge holds higher losses"
        curves.append(Curve(label, failed, len(lines), "none", "cross"))
    values = [float(row.values[key]) for row in rows]
    is_log = min(values) > 0 and max(values) / min(values) >= _WIDE
    return draw([Chart(title, key, "nats per token", curves, log_across=is_log)], title)
