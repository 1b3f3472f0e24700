"""Figures of a benchmark: medians over steps, then over repeats; and the table."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import median

from titanlite.cli.run_figures import NONE, finite, number
from titanlite.runs.read import Row, Run
from titanlite.utils import Table


@dataclass(frozen=True)
class RunFigures:
    """Figures of one finished run."""

    level: str
    #: From 1.
    repeat: int
    #: Over all devices; the median of the steps after the warm-up.
    tokens_per_second: float
    #: Percent; None if the device's peak is unknown.
    mfu: float | None
    #: GiB; the maximum over all steps of rank 0.
    memory_gib: float | None
    #: Loss of each logged step.
    losses: dict[int, float]


@dataclass(frozen=True)
class LevelFigures:
    """Figures of all repeats of one level: a row of the table. None if unknown."""

    level: str
    #: Number of finished runs.
    repeats: int
    tokens_per_second: float | None
    #: Speed over the baseline's speed in the same repeat: median, minimum, maximum.
    ratio: tuple[float, float, float] | None
    mfu: float | None
    memory_gib: float | None
    #: Loss of the last step.
    loss: float | None
    #: Maximum of |loss - baseline loss| over equal steps of the same repeat; None for the baseline.
    loss_difference: float | None
    #: Maximum of the same between repeats of this level: the noise of the machine.
    loss_spread: float | None


def after_warmup(rows: Sequence[Row], warmup: int) -> list[Row]:
    """Return the rows of means over steps that all come after the warm-up."""
    before = [0.0, *(row["step"] for row in rows)]
    return [row for row, start in zip(rows, before, strict=False) if start >= warmup]


def measure(run: Run, level: str, repeat: int, warmup: int) -> RunFigures:
    """Return the figures of a finished run that logged steps after the warm-up."""
    rows = after_warmup(run.training, warmup)
    return RunFigures(
        level,
        repeat,
        median(finite(rows, "total_tps")),
        _known(median, finite(rows, "mfu")),
        _known(max, finite(run.training, "memory_gib")),
        {int(row["step"]): row["loss"] for row in run.training},
    )


def summarize(levels: Sequence[str], runs: Sequence[RunFigures]) -> list[LevelFigures]:
    """Return one row per level; the first level is the baseline."""
    baseline = {run.repeat: run for run in runs if run.level == levels[0]}
    found = []
    for level in levels:
        mine = sorted((run for run in runs if run.level == level), key=lambda run: run.repeat)
        pairs = [(run, baseline[run.repeat]) for run in mine if run.repeat in baseline]
        ratios = [run.tokens_per_second / base.tokens_per_second for run, base in pairs]
        figures = LevelFigures(
            level,
            len(mine),
            _known(median, [run.tokens_per_second for run in mine]),
            (median(ratios), min(ratios), max(ratios)) if ratios else None,
            _known(median, [run.mfu for run in mine]),
            _known(max, [run.memory_gib for run in mine]),
            _known(median, [run.losses[max(run.losses)] for run in mine]),
            None if level == levels[0] else _largest_difference(pairs),
            _largest_difference([(run, mine[0]) for run in mine[1:]]),
        )
        found.append(figures)
    return found


def _known(pick: Callable[[list[float]], float], values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return pick(known) if known else None


def _largest_difference(pairs: Iterable[tuple[RunFigures, RunFigures]]) -> float | None:
    """NaN if one is NaN, which `max` alone would hide."""
    found = []
    for a, b in pairs:
        found += [abs(a.losses[step] - b.losses[step]) for step in a.losses.keys() & b.losses]
    return max(found, key=lambda value: (math.isnan(value), value), default=None)


def table(levels: Sequence[LevelFigures], steps: int, repeats: int) -> Table:
    """Return one row per level."""
    columns = (
        "level",
        "tokens/s",
        "ratio (min–max)",
        "MFU %",
        "memory GiB",
        f"loss at step {steps:,}",
        "largest loss difference",
        "runs",
    )
    rows = []
    for level in levels:
        ratio = NONE
        if level.ratio is not None:
            ratio = "{:.2f} ({:.2f}–{:.2f})".format(*level.ratio)
        row = (
            level.level,
            number(level.tokens_per_second, ",.0f"),
            ratio,
            number(level.mfu, ".2f"),
            number(level.memory_gib, ".2f"),
            number(level.loss, ".4f"),
            number(level.loss_difference, ".2g"),
            f"{level.repeats} of {repeats}",
        )
        rows.append(row)
    return Table(columns, rows)
