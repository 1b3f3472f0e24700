"""From the runs of a ladder to its figures: medians over steps, then over repeats; ratios repeat by repeat."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median

from titanlite.runs.read import Row, Run


@dataclass(frozen=True)
class Measured:
    """One finished run."""

    level: str
    #: From 1.
    repeat: int
    #: Over all devices; the median of the steps that count.
    tokens_per_second: float
    #: Percent; None where the device's peak is unknown.
    mfu: float | None
    #: GiB, the highest of all steps.
    memory_gib: float | None
    #: Loss by step, all steps that were logged.
    losses: dict[int, float]


@dataclass(frozen=True)
class LevelFigures:
    """A line of the table: all repeats of one level. None where it is not known."""

    level: str
    repeats: int
    tokens_per_second: float | None = None
    #: Of the level's speed to the baseline's in the same repeat: median, lowest, highest.
    ratio: tuple[float, float, float] | None = None
    mfu: float | None = None
    memory_gib: float | None = None
    #: At the last step.
    loss: float | None = None
    #: Largest at equal steps of the same repeat, without regard to sign; None for the baseline itself.
    loss_difference: float | None = None
    #: Largest between repeats of this level: what the machine does to a loss by itself.
    loss_spread: float | None = None


def counted(rows: Sequence[Row], warmup: int) -> list[Row]:
    """The rows whose whole window lies after the warm-up: a row's figures are means since the row before it."""
    before = [0.0, *(row["step"] for row in rows)]
    return [row for row, start in zip(rows, before, strict=False) if start >= warmup]


def logged_steps(steps: int, log_freq: int) -> list[int]:
    """The steps of a fresh run that are logged."""
    return sorted({1, steps, *range(log_freq, steps + 1, log_freq)})


def measure(run: Run, level: str, repeat: int, warmup: int) -> Measured | None:
    """The figures of a finished run; None when no step after the warm-up has them."""
    rows = counted(run.training, warmup)
    speeds = _all(rows, "total_tps")
    if not speeds:
        return None
    mfu, memory = _all(rows, "mfu"), _all(run.training, "memory_gib")
    return Measured(
        level,
        repeat,
        median(speeds),
        median(mfu) if mfu else None,
        max(memory) if memory else None,
        {int(row["step"]): row["loss"] for row in run.training},
    )


def _all(rows: Iterable[Row], name: str) -> list[float]:
    return [row[name] for row in rows if name in row and math.isfinite(row[name])]


def summarize(levels: Sequence[str], measured: Sequence[Measured], unlike: Iterable[str] = ()) -> list[LevelFigures]:
    """A line for each level, in their order; the first is the baseline.

    unlike: levels of other weights or text, whose losses are not set against the baseline's.
    """
    found = []
    baseline = {one.repeat: one for one in measured if one.level == levels[0]}
    for level in levels:
        mine = sorted((one for one in measured if one.level == level), key=lambda one: one.repeat)
        if not mine:
            found.append(LevelFigures(level, 0))
            continue
        pairs = [(one, baseline[one.repeat]) for one in mine if one.repeat in baseline]
        ratios = [one.tokens_per_second / base.tokens_per_second for one, base in pairs]
        compared = level != levels[0] and level not in unlike
        found.append(
            LevelFigures(
                level,
                len(mine),
                median(one.tokens_per_second for one in mine),
                (median(ratios), min(ratios), max(ratios)) if ratios else None,
                _median(one.mfu for one in mine),
                max((one.memory_gib for one in mine if one.memory_gib is not None), default=None),
                median(one.losses[max(one.losses)] for one in mine),
                _largest(loss_difference(one, base) for one, base in pairs) if compared else None,
                _largest(loss_difference(one, mine[0]) for one in mine[1:]),
            )
        )
    return found


def loss_difference(one: Measured, other: Measured) -> float | None:
    """The largest difference of losses at equal steps; None where no step is equal."""
    return _largest(abs(one.losses[step] - other.losses[step]) for step in one.losses.keys() & other.losses.keys())


def _median(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return median(known) if known else None


def _largest(values: Iterable[float | None]) -> float | None:
    """NaN if any is: `max` would hide it."""
    known = [value for value in values if value is not None]
    if any(math.isnan(value) for value in known):
        return math.nan
    return max(known, default=None)
