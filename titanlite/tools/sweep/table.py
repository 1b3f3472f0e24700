"""The table of a sweep: its points with their losses, the best one, and what failed."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from titanlite.tools.sweep.folder import Plan
from titanlite.tools.sweep.members import CONSOLE, MemberResult
from titanlite.tools.sweep.points import SEED, Point, Values, is_number, labels, shown
from titanlite.utils import Table, human_count, human_time

NONE = "–"
_RATE = "optimizer.lr"
#: States by how much they spoil a point.
_WORST = ("done", "running", "unfinished", "diverged", "failed")
_REASON_LENGTH = 160
METRIC_NAMES = {
    "validation_loss": "validation loss",
    "best_validation_loss": "best validation loss",
    "training_loss": "training loss",
}


@dataclass(frozen=True)
class Group:
    """A point with the runs of all its seeds."""

    #: By key, without the seed.
    values: Values
    points: Sequence[Point]
    results: Sequence[MemberResult]
    #: Figures of its runs that are finite, by the metric of the sweep.
    losses: Sequence[float]

    @property
    def state(self) -> str:
        """The worst state of its runs."""
        return max((result.state for result in self.results), key=_WORST.index)

    @property
    def is_whole(self) -> bool:
        """Whether all its runs are done and have a loss."""
        return self.state == "done" and len(self.losses) == len(self.results)

    @property
    def mean(self) -> float | None:
        return statistics.fmean(self.losses) if self.losses else None

    @property
    def spread(self) -> float | None:
        """The standard deviation over its seeds; None with fewer than two."""
        return statistics.stdev(self.losses) if len(self.losses) > 1 else None


def groups_of(plan: Plan, results: Sequence[MemberResult]) -> list[Group]:
    """Return the points with their runs, in order."""
    members: dict[str, list[tuple[Point, MemberResult]]] = {}
    for point, result in zip(plan.points, results, strict=True):
        members.setdefault(point.without_seed, []).append((point, result))
    found = []
    for pairs in members.values():
        points = [point for point, _ in pairs]
        own = [result for _, result in pairs]
        losses = [getattr(result, plan.metric) for result in own if result.state == "done"]
        finite = [loss for loss in losses if loss is not None and math.isfinite(loss)]
        values = {key: value for key, value in points[0].values.items() if key != SEED}
        found.append(Group(values, points, own, finite))
    return found


def best_of(groups: Sequence[Group]) -> Group | None:
    """Return the point with the lowest mean loss; None where no point has all its runs."""
    whole = [group for group in groups if group.is_whole]
    return min(whole, key=lambda group: group.mean or 0.0, default=None)


def table(plan: Plan, groups: Sequence[Group], best: Group | None) -> Table:
    """Return a row for each point. The best one has a star."""
    keys = [key for key in plan.keys if key != SEED]
    short = labels(keys)
    has_seeds = any(len(group.results) > 1 for group in groups)
    columns = ["", *(short[key] for key in keys)]
    if has_seeds:
        columns.append("seeds")
    columns.append(METRIC_NAMES[plan.metric])
    if plan.metric != "training_loss":
        columns.append("training loss")
    columns += ["tokens", "time", "state"]
    rows = []
    for group in groups:
        row = ["*" if group is best else "", *(shown(group.values[key]) for key in keys)]
        if has_seeds:
            row.append(f"{len(group.losses)} of {len(group.results)}")
        row.append(_loss(group))
        if plan.metric != "training_loss":
            row.append(_mean([result.training_loss for result in group.results]))
        tokens = sum(result.tokens for result in group.results)
        seconds = sum(result.seconds for result in group.results)
        rows.append([*row, human_count(tokens), human_time(seconds), _states(group)])
    return Table(columns, rows, left=(0, len(columns) - 1), title=plan.title)


def _loss(group: Group) -> str:
    if group.mean is None:
        return NONE
    text = f"{group.mean:.4f}"
    return text if group.spread is None else f"{text} ± {group.spread:.4f}"


def _mean(figures: Sequence[float | None]) -> str:
    known = [figure for figure in figures if figure is not None]
    return f"{statistics.fmean(known):.4f}" if known else NONE


def _states(group: Group) -> str:
    """Return the states of a point's runs, with their numbers where they differ."""
    states = [result.state for result in group.results]
    found = sorted(set(states), key=_WORST.index)
    if len(found) == 1:
        return found[0]
    return ", ".join(f"{states.count(state)} {state}" for state in found)


def notes(plan: Plan, groups: Sequence[Group], best: Group | None, folder: Path) -> list[str]:
    """Return lines below the table: the best point, values to try next, what went wrong."""
    found = []
    if best is None:
        found.append("no point has all its runs done, so none is the best")
    else:
        found.append(f"best: {in_words(best.values)}, {METRIC_NAMES[plan.metric]} {_loss(best)}")
        found += _edges(groups, best)
        found += _best_of_each(plan, groups)
    for group in groups:
        for result in group.results:
            if result.state in ("failed", "diverged"):
                found += _trouble(result, folder)
    count = sum(result.state == "unfinished" for group in groups for result in group.results)
    if count:
        found.append(f"{count} of {len(plan.points)} runs are not finished: start the sweep again")
    return found


def in_words(values: Values) -> str:
    """Return values as `lr = 0.003, dim = 64`; of a point that has seeds alone, `the config`."""
    short = labels(list(values))
    parts = [f"{short[key]} = {shown(value)}" for key, value in values.items()]
    return ", ".join(parts) or "the config itself"


def horizontal_key(plan: Plan) -> str | None:
    """Return the key of the horizontal axis: the learning rate, else the first number that varies.

    None: no number varies.
    """
    found = []
    for key in plan.keys:
        values = [point.values[key] for point in plan.points]
        if key != SEED and all(map(is_number, values)) and len(set(values)) > 1:
            found.append(key)
    rates = [key for key in found if _is_rate(key)]
    return next(iter([*rates, *found]), None)


def families(groups: Sequence[Group], key: str) -> dict[str, list[Group]]:
    """Return the points by the values of the keys beside this one, in words.

    Keys that the ones before them decide are left out, as the heads of each width.
    """
    telling = telling_keys(groups, key)
    found: dict[str, list[Group]] = {}
    for group in groups:
        others = {name: group.values[name] for name in telling}
        found.setdefault(in_words(others) if others else labels([key])[key], []).append(group)
    return found


def telling_keys(groups: Sequence[Group], key: str) -> list[str]:
    """Return the keys beside this one that tell the points apart, each only where it adds to it."""
    telling: list[str] = []
    told = 1
    for name in groups[0].values:
        if name == key:
            continue
        named = {in_words({one: group.values[one] for one in [*telling, name]}) for group in groups}
        if len(named) > told:
            telling.append(name)
            told = len(named)
    return telling


def _best_of_each(plan: Plan, groups: Sequence[Group]) -> list[str]:
    """Return the best learning rate for each set of other values, where there are several.

    Also where a parabola has its lowest point: a grid of factors of 2 tells no more than those.
    """
    key = horizontal_key(plan)
    if key is None:
        return []
    by_others = families(groups, key)
    name = labels([key])[key]
    found = []
    for others, members in by_others.items():
        best = best_of(members)
        if best is None:
            continue
        lowest = _lowest(members, best, key) if _is_rate(key) else None
        by_parabola = "" if lowest is None else f"by a parabola {lowest:.3g}"
        if len(by_others) > 1:
            parts = [f"    {others}: best {name} {shown(best.values[key])}", by_parabola]
            found.append(", ".join(filter(None, parts)))
        elif by_parabola:
            found.append(f"    best {name} {by_parabola}")
    return found


def _is_rate(key: str) -> bool:
    return key == _RATE or key.endswith(".lr")


def _lowest(members: Sequence[Group], best: Group, key: str) -> float | None:
    """Return where the parabola through the best point and its neighbours is lowest.

    It is one of the loss over the logarithm of the key. None: the best value is the first or the
    last one, a neighbour has no loss, or a value is 0.
    """
    ordered = sorted(members, key=lambda group: float(group.values[key]))
    place = ordered.index(best)
    three = ordered[place - 1 : place + 2] if place else []
    losses = [group.mean for group in three if group.is_whole and group.mean is not None]
    if len(losses) < 3 or three[0].values[key] <= 0:
        return None
    left, middle, right = (math.log(group.values[key]) for group in three)
    # Slopes on both sides; the parabola has them half way to each neighbour.
    falls = (losses[1] - losses[0]) / (middle - left)
    rises = (losses[2] - losses[1]) / (right - middle)
    if rises <= falls:
        return None
    begin = (left + middle) / 2
    end = (middle + right) / 2
    return math.exp(begin - falls * (end - begin) / (rises - falls))


def _trouble(result: MemberResult, folder: Path) -> list[str]:
    reason = result.reason.partition(". ")[0]
    if len(reason) > _REASON_LENGTH:
        reason = f"{reason[:_REASON_LENGTH]}…"
    lines = [
        f"{result.name} {result.state} after step {result.steps}: {reason or 'loss not finite'}"
    ]
    if result.state == "failed":
        lines += [f"    {line}" for line in result.last_lines]
        lines.append(f"    its output: {folder / result.name / CONSOLE}")
    return lines


def _edges(groups: Sequence[Group], best: Group) -> list[str]:
    """Return hints where the best value of a number is the lowest or the highest one tried."""
    found = []
    for key, value in best.values.items():
        # A larger model is no better setting, and neither is another base model.
        if key.startswith(("model.", "mup.")):
            continue
        tried = {group.values[key] for group in groups if is_number(group.values[key])}
        if len(tried) < 2 or not is_number(value):
            continue
        if value == min(tried):
            found.append(f"its {key} is the lowest of all: a lower one may be better")
        elif value == max(tried):
            found.append(f"its {key} is the highest of all: a higher one may be better")
    return found
