"""The figures of several runs side by side, and the differences between the runs, as tables."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from titanlite.cli.run_figures import finite, number, state_words, table
from titanlite.runs.attempts import Attempt
from titanlite.runs.jsonl import FILE as METRICS
from titanlite.runs.read import Row, Run, RunError, read_run
from titanlite.runs.tables import Table

#: Equal steps at which losses are shown.
STEPS_SHOWN = 5

#: Variables that differ between any two runs and affect neither speed nor numbers.
_IRRELEVANT = re.compile(
    r"(SLURM|TORCHELASTIC)_.*|(LOCAL_|GROUP_)?WORLD_SIZE|.*_(ID|PORT|PID|FILE|DIR|ADDR)"
)


@dataclass(frozen=True)
class Figure:
    """A line of the comparison: a value per run, and how the others relate to the first."""

    name: str
    values: Sequence[float | None]
    form: str

    def cells(self) -> list[str]:
        """Return the values as text, e.g. `1,234 (1.05×)`, or of losses `4.5621 (+0.0012)`."""
        first = self.values[0]
        cells = [number(first, self.form)]
        for value in self.values[1:]:
            text = number(value, self.form)
            if value is not None and first and math.isfinite(value) and math.isfinite(first):
                relation = f"{value / first:.2f}×"
                if "loss" in self.name:
                    relation = f"{value - first:+{self.form}}"
                text += f" ({relation})"
            cells.append(text)
        return cells


@dataclass(frozen=True)
class Comparison:
    """The result of `compare`."""

    runs: Sequence[Run]
    #: A short name per run.
    labels: Sequence[str]
    figures: Sequence[Figure]
    #: Value per run of each config key and circumstance that differs; None: not set.
    differences: Mapping[str, tuple[Any, ...]]
    notes: Sequence[str]


def read_runs(paths: Sequence[Path]) -> list[Run]:
    """Read the runs to compare. Raises RunError for a folder without a run or figures."""
    runs = [read_run(path) for path in paths]
    for run in runs:
        if not run.training:
            raise RunError(
                f"{run.folder}: {METRICS} has no training step yet; wait for its first logged "
                "step, or leave it out"
            )
    return runs


def compare(runs: Sequence[Run]) -> Comparison:
    """Compare runs. Each has at least one training row."""
    whole = [run.folder.resolve() for run in runs]
    common = os.path.commonpath([path.parent for path in whole])
    rows = [steady(run) for run in runs]
    training = [run.training for run in runs]

    def picked(
        name: str, form: str, key: str, pick: Callable[[list[float]], float], parts: list[list[Row]]
    ) -> Figure:
        values = [finite(part, key) for part in parts]
        return Figure(name, [pick(found) if found else None for found in values], form)

    figures = [
        picked("tokens/s", ",.0f", "total_tps", median, rows),
        picked("tokens/s per device", ",.0f", "tps", median, rows),
        picked("MFU %", ".2f", "mfu", median, rows),
        picked("memory GiB, peak", ".2f", "memory_gib", max, training),
    ]
    losses = _at_equal_steps("loss", training, STEPS_SHOWN)
    figures += losses
    figures += _at_equal_steps("validation_loss", [run.validations for run in runs], 1)
    notes = [f"{run.folder}: {state_words(run)}: {run.reason}" for run in runs if run.reason]
    if not losses:
        notes.append("no step was logged by all runs: metrics.log_freq decides which are logged")
    return Comparison(
        runs,
        [os.path.relpath(path, common) for path in whole],
        [figure for figure in figures if any(value is not None for value in figure.values)],
        _differences(runs),
        notes,
    )


def steady(run: Run) -> list[Row]:
    """Return the training rows without the first two of each attempt, which pay for compilation.

    Of two rows the second is kept.
    """
    found = []
    for part in run.segments():
        found += part[2:] if len(part) > 2 else part[1:]
    return found


def _at_equal_steps(name: str, rows: Sequence[Sequence[Row]], count: int) -> list[Figure]:
    """Return a loss at `count` steps of all runs at most."""
    losses = [{int(row["step"]): row[name] for row in part} for part in rows]
    steps = sorted(set.intersection(*map(set, losses)))
    shown = min(count, len(steps))
    places = {round((i + 1) * len(steps) / shown) - 1 for i in range(shown)}
    figures = []
    for place in sorted(places):
        step = steps[place]
        title = f"{name.replace('_', ' ')} at step {step:,}"
        figures.append(Figure(title, [one[step] for one in losses], ".4f"))
    return figures


def tables(comparison: Comparison) -> list[Table]:
    """Return tables of runs, figures, and differences if there are any."""
    labels = comparison.labels
    runs = table(comparison.runs)
    named = [(label, *row) for label, row in zip(labels, runs.rows, strict=True)]
    figures = [(figure.name, *figure.cells()) for figure in comparison.figures]
    found = [Table(("", *runs.columns), named, (0, 1, 2)), Table(("", *labels), figures)]
    rows = [(name, *map(str, values)) for name, values in comparison.differences.items()]
    if rows:
        found.append(Table(("what differs", *labels), rows, range(len(labels) + 1)))
    return found


def _differences(runs: Sequence[Run]) -> dict[str, tuple[Any, ...]]:
    """Config keys come first, then circumstances that may explain a difference."""
    have_configs = all(run.config is not None for run in runs)
    have_attempts = all(run.attempts for run in runs)
    sides = []
    for run in runs:
        side = dict(run.config or {}) if have_configs else {}
        if have_attempts:
            side |= _circumstances(run.attempts[-1])
        sides.append(side)
    differing = {}
    for name in dict.fromkeys(name for side in sides for name in side):
        values = tuple(side.get(name) for side in sides)
        # The folder always differs.
        if len(set(map(str, values))) > 1 and name != "job.dump_folder":
            differing[name] = values
    return differing


def _circumstances(attempt: Attempt) -> dict[str, Any]:
    found = {name: attempt.get(name) for name in ("ranks", "device", "host")}
    for name, value in (attempt.get("git") or {}).items():
        found[f"git {name}"] = value
    for name, value in (attempt.get("versions") or {}).items():
        found[f"version of {name}"] = value
    for name, value in (attempt.get("environment") or {}).items():
        if not _IRRELEVANT.fullmatch(name):
            found[name] = value
    return found
