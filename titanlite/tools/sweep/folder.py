"""The files of a sweep's folder, beside those of its members.

sweep.json      the points, so that the table can be made again
results.json    the figures of all runs
sweep.svg       loss over the learning rate, or another key
best.toml       the whole config of the best point
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from titanlite.config.errors import ConfigError
from titanlite.config.load import read
from titanlite.config.sweep_table import METRICS
from titanlite.config.toml import quote
from titanlite.runs.record import CONFIG
from titanlite.tools.sweep.members import NAME, RECORD, Member, MemberResult, SweepError
from titanlite.tools.sweep.points import Point
from titanlite.utils import atomic_write, escape_name, parse_json, public_tree

PLAN = "sweep.json"
RESULTS = "results.json"
PICTURE = "sweep.svg"
BEST = "best.toml"


@dataclass(frozen=True)
class Plan:
    """What a sweep runs, as its folder keeps it."""

    #: Name of the folder.
    title: str
    #: The loss by which points are compared.
    metric: str
    #: Keys that vary, the seed last.
    keys: tuple[str, ...]
    points: tuple[Point, ...]
    #: Ranks of each run.
    ranks: int = 1


def write_plan(plan: Plan, folder: Path) -> None:
    """Write `sweep.json`, unless it says the same already. Raises OSError."""
    points = []
    for point in plan.points:
        flags = list(point.member.flags)
        points.append({"name": point.member.name, "flags": flags, "values": dict(point.values)})
    tree = {**asdict(plan), "keys": list(plan.keys), "points": points}
    text = json.dumps(public_tree(tree), indent=1, default=str) + "\n"
    path = folder / PLAN
    # The tasks of a job array may write it at the same time.
    if path.exists() and path.read_text(encoding="utf-8") == text:
        return
    folder.mkdir(parents=True, exist_ok=True)
    atomic_write(path, text)


def read_plan(folder: Path) -> Plan:
    """Return the plan of a sweep. Raises SweepError."""
    path = folder / PLAN
    try:
        found = parse_json(path.read_bytes())
    except FileNotFoundError:
        raise SweepError(
            f"{folder} is no folder of a sweep: it has no {PLAN}; `titanlite sweep FILE --folder "
            f"{folder}` makes one"
        ) from None
    except (OSError, ValueError) as error:
        raise SweepError(f"cannot read {path}: {error}; run the sweep again") from None
    try:
        return _plan_of(found)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise SweepError(
            f"{path} is damaged ({type(error).__name__}: {error}); run the sweep again"
        ) from None


def _plan_of(tree: Any) -> Plan:
    """Return the plan that a tree of JSON holds. Raises one of several errors for a wrong one."""
    points = []
    for point in tree["points"]:
        name = point["name"]
        # It becomes a path.
        if not NAME.fullmatch(name):
            raise ValueError(f"{name!r} is no name of a member")
        values = {str(key): value for key, value in point["values"].items()}
        points.append(Point(Member(name, [str(flag) for flag in point["flags"]]), values))
    if tree["metric"] not in METRICS:
        raise ValueError(f"{tree['metric']!r} is no metric")
    keys = tuple(str(key) for key in tree["keys"])
    if not all(key in point.values for point in points for key in keys):
        raise ValueError("a point lacks a key")
    return Plan(str(tree["title"]), tree["metric"], keys, tuple(points), int(tree["ranks"]))


def strangers(plan: Plan, folder: Path) -> list[str]:
    """Return the names of runs of earlier sweeps in the folder, which are no points of this one."""
    names = {point.member.name for point in plan.points}
    found = []
    for record in sorted(folder.glob(f"*/{RECORD}")):
        if record.parent.name not in names:
            found.append(record.parent.name)
    return found


def write_best(plan: Plan, best: Point, result: MemberResult, folder: Path) -> Path:
    """Write the config of the best point, as its run has recorded it.

    Its run writes into another folder. Raises OSError, and ConfigError for a damaged record.
    """
    kept = folder / best.member.name / CONFIG
    # With the names of variables, not their values. Nothing of it runs here.
    config, problems = read([f"--job.config_file={kept}"], defer=True)
    if problems:
        raise ConfigError(problems)
    new = config.changed({"job.dump_folder": str(folder / "best")})
    path = folder / BEST
    values = ", ".join(f"{key} = {quote(value)}" for key, value in best.values.items())
    words = ["titanlite", "train", str(path)]
    if plan.ranks > 1:
        words.append(f"--nproc-per-node={plan.ranks}")
    losses = [
        f"{name.replace('_', ' ')} {value:.6g}"
        for name, value in figures(result).items()
        if value is not None
    ]
    head = [
        f"# The best point of the sweep {folder}: {values}",
        f"# {', '.join(losses)}. It trains again with",
        f"#   {shlex.join(words)}",
        "# On CPUs its losses are the same with OMP_NUM_THREADS=1, as the sweep has set it.",
    ]
    lines = [escape_name(line) for line in head]
    atomic_write(path, "\n".join([*lines, "", new.to_toml(defaults=False)]))
    return path


def figures(result: MemberResult) -> dict[str, float | None]:
    """Return the losses of a run by the names that `metric` takes."""
    return {name: getattr(result, name) for name in METRICS}


def write_results(plan: Plan, results: Sequence[MemberResult], best: str, folder: Path) -> str:
    """Write `results.json`, and return its text.

    best: name of the best point's run; "" without one. Raises OSError.
    """
    from titanlite.tools.commands.run_figures import to_json

    runs = []
    for point, result in zip(plan.points, results, strict=True):
        runs.append({**asdict(result), "values": dict(point.values), "loss": result.loss})
    tree = {
        "sweep": plan.title,
        "metric": plan.metric,
        "keys": list(plan.keys),
        "best": best or None,
        "ranks": plan.ranks,
        "runs": runs,
    }
    text = to_json(public_tree(tree))
    atomic_write(folder / RESULTS, text + "\n")
    return text
