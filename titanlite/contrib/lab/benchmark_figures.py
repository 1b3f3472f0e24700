"""Figures of a benchmark: medians over steps, then over repeats; and the table."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
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
    #: Of the last step.
    loss: float | None
    #: Maximum of |loss - baseline loss| over equal steps of the same repeat; None for the baseline.
    loss_difference: float | None
    #: Maximum of the same between repeats of this level: the noise of the machine.
    loss_spread: float | None


def after_warmup(rows: Sequence[Row], warmup: int) -> list[Row]:
    """Return the rows whose steps all come after the warm-up.

    A row holds means over the steps since the row before.
    """
    before = [0.0, *(row["step"] for row in rows)]
    return [row for row, start in zip(rows, before, strict=False) if start >= warmup]


def measure(run: Run, level: str, repeat: int, warmup: int) -> RunFigures:
    """Return the figures of a finished run that logged steps after the warm-up."""
    rows = after_warmup(run.training, warmup)
    memory = max(finite(run.training, "memory_gib"), default=None)
    losses = {int(row["step"]): row["loss"] for row in run.training}
    return RunFigures(
        level,
        repeat,
        median(finite(rows, "total_tps")),
        _median(finite(rows, "mfu")),
        memory,
        losses,
    )


def summarize(
    levels: Sequence[str], runs: Sequence[RunFigures], not_comparable: Iterable[str] = ()
) -> list[LevelFigures]:
    """Return one row per level; the first level is the baseline.

    not_comparable: levels with other weights or text, whose losses are not compared with the
    baseline.
    """
    baseline = {run.repeat: run for run in runs if run.level == levels[0]}
    found = []
    for i, level in enumerate(levels):
        mine = sorted((run for run in runs if run.level == level), key=lambda run: run.repeat)
        pairs = [(run, baseline[run.repeat]) for run in mine if run.repeat in baseline]
        ratios = [run.tokens_per_second / base.tokens_per_second for run, base in pairs]
        figures = LevelFigures(
            level,
            len(mine),
            _median(run.tokens_per_second for run in mine),
            (median(ratios), min(ratios), max(ratios)) if ratios else None,
            _median(run.mfu for run in mine),
            max((run.memory_gib for run in mine if run.memory_gib is not None), default=None),
            _median(run.losses[max(run.losses)] for run in mine),
            _largest_difference(pairs) if i and level not in not_comparable else None,
            _largest_difference([(run, mine[0]) for run in mine[1:]]),
        )
        found.append(figures)
    return found


def _median(values: Iterable[float | None]) -> float | None:
    """Return the median of the values that are known, None if none is."""
    known = [value for value in values if value is not None]
    return median(known) if known else None


def _largest_difference(pairs: Iterable[tuple[RunFigures, RunFigures]]) -> float | None:
    """Over equal steps of each pair. NaN if one is NaN: `max` alone would hide it."""
    known = []
    for a, b in pairs:
        for step in a.losses.keys() & b.losses.keys():
            known.append(abs(a.losses[step] - b.losses[step]))
    if any(map(math.isnan, known)):
        return math.nan
    return max(known, default=None)


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
        is_baseline = level is levels[0]
        difference = number(level.loss_difference, ".2g")
        row = (
            level.level,
            number(level.tokens_per_second, ",.0f"),
            _ratio(level, is_baseline),
            number(level.mfu, ".2f"),
            number(level.memory_gib, ".2f"),
            number(level.loss, ".4f"),
            "baseline" if is_baseline else difference,
            f"{level.repeats} of {repeats}",
        )
        rows.append(row)
    return Table(columns, rows)


def _ratio(level: LevelFigures, is_baseline: bool) -> str:
    if level.ratio is None:
        return NONE
    if is_baseline:
        return "1"
    middle, lowest, highest = level.ratio
    return f"{middle:.2f} ({lowest:.2f}–{highest:.2f})"
