"""The figures of several runs side by side, and the differences between the runs: as tables, as
JSON, and as one HTML file that runs no script and fetches nothing.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, Literal

from titanlite.cli import render_page
from titanlite.cli.pictures import draw
from titanlite.cli.run_figures import charts, finite, last, number, state_words, table
from titanlite.runs.attempts import Attempt
from titanlite.runs.jsonl import FILE as METRICS
from titanlite.runs.read import Row, Run, RunError, read_run
from titanlite.utils import Table

#: Equal steps at which losses are shown.
STEPS_SHOWN = 5

#: Variables that differ between any two runs and affect neither speed nor numbers.
_IRRELEVANT = re.compile(
    r"(SLURM|TORCHELASTIC)_.*|(LOCAL_|GROUP_)?WORLD_SIZE|.*_(ID|PORT|PID|FILE|DIR|ADDR)"
)


@dataclass(frozen=True)
class Figure:
    """One line of the comparison: a value per run, and the relation of the others to the first."""

    name: str
    values: tuple[float | None, ...]
    form: str
    relation: Literal["ratio", "difference", None]

    def cells(self) -> list[str]:
        """Return the values as text, e.g. `1,234 (1.05×)` or `4.5621 (+0.0012)`."""
        first, *others = self.values
        return [self._cell(first, None), *(self._cell(value, first) for value in others)]

    def _cell(self, value: float | None, first: float | None) -> str:
        text = number(value, self.form)
        if value is None or first is None or not (math.isfinite(value) and math.isfinite(first)):
            return text
        if self.relation == "difference":
            return f"{text} ({format(value - first, '+' + self.form)})"
        if self.relation == "ratio" and first:
            return f"{text} ({value / first:.2f}×)"
        return text


@dataclass(frozen=True)
class Comparison:
    """The result of `compare`."""

    runs: tuple[Run, ...]
    #: A short name per run.
    labels: tuple[str, ...]
    figures: tuple[Figure, ...]
    #: Steps that all runs logged, up to the last; `figures` has a line for each.
    steps: tuple[int, ...]
    #: Value per run of each config key and circumstance that differs; None: not set.
    differences: Mapping[str, tuple[Any, ...]]
    notes: tuple[str, ...]


def read_runs(paths: Sequence[Path]) -> list[Run]:
    """Read the runs to compare.

    Raises RunError for a folder without a run or figures, or one named twice.
    """
    runs = [read_run(path) for path in paths]
    places = [run.folder.resolve() for run in runs]
    for i, run in enumerate(runs):
        if places[i] in places[:i]:
            raise RunError(f"{run.folder}: named twice; a run compared with itself shows nothing")
        if not run.training:
            raise RunError(
                f"{run.folder}: {METRICS} has no training step yet; wait for its first logged "
                "step, or leave it out"
            )
    return runs


def compare(runs: Sequence[Run]) -> Comparison:
    """Compare runs. Each has at least one training row."""
    labels = short_names([run.folder for run in runs])
    losses = [{int(row["step"]): row["loss"] for row in run.training} for run in runs]
    steps = spread(sorted(set.intersection(*map(set, losses))), STEPS_SHOWN)
    rows = [steady(run) for run in runs]
    training = [run.training for run in runs]

    def ratio(
        title: str,
        form: str,
        pick: Callable[[list[float]], float],
        name: str,
        source: list[list[Row]],
    ) -> Figure:
        picked: list[float | None] = []
        for part in source:
            values = finite(part, name)
            picked.append(pick(values) if values else None)
        return Figure(title, tuple(picked), form, "ratio")

    figures = [
        ratio("tokens/s", ",.0f", median, "total_tps", rows),
        ratio("tokens/s per device", ",.0f", median, "tps", rows),
        ratio("MFU %", ".2f", median, "mfu", rows),
        ratio("memory GiB, peak", ".2f", max, "memory_gib", training),
        ratio("reserved GiB, peak", ".2f", max, "reserved_gib", training),
        *(
            Figure(
                f"loss at step {step:,}", tuple(one[step] for one in losses), ".4f", "difference"
            )
            for step in steps
        ),
        *_validation(runs),
    ]
    return Comparison(
        tuple(runs),
        labels,
        tuple(figure for figure in figures if any(value is not None for value in figure.values)),
        tuple(steps),
        _differences(runs),
        tuple(_notes(runs, labels, bool(steps))),
    )


def steady(run: Run) -> list[Row]:
    """Return the training rows without the first two of each attempt, which pay for compilation and
    allocation.

    Of an attempt with two rows, the second is kept.
    """
    found = []
    for part in run.segments():
        found += part[2:] if len(part) > 2 else part[1:]
    return found


def _validation(runs: Sequence[Run]) -> Iterator[Figure]:
    """Yield the final validation losses, and those of the last common step where the final steps
    differ.
    """
    losses = [{int(row["step"]): row["validation_loss"] for row in run.validations} for run in runs]
    finals = tuple(float(max(steps)) if steps else None for steps in losses)
    same = len(set(finals)) == 1
    if not same:
        shared = set.intersection(*map(set, losses))
        if shared:
            step = max(shared)
            values = tuple(found[step] for found in losses)
            yield Figure(f"validation loss at step {step:,}", values, ".4f", "difference")
        yield Figure("final validation, step", finals, ",.0f", None)
    final = tuple(last(run, "validation_loss") for run in runs)
    yield Figure("final validation loss", final, ".4f", "difference" if same else None)


def spread(steps: Sequence[int], count: int) -> list[int]:
    """Return at most `count` of the steps at equal distances, including the last."""
    if not steps:
        return []
    return sorted({steps[round((i + 1) * len(steps) / count) - 1] for i in range(count)})


def short_names(paths: Sequence[Path]) -> tuple[str, ...]:
    """Return the paths below their common folder."""
    whole = [path.resolve() for path in paths]
    common = os.path.commonpath([path.parent for path in whole])
    return tuple(os.path.relpath(path, common) for path in whole)


def tables(comparison: Comparison) -> list[Table]:
    """Return the table of runs, that of figures, and that of differences if there are any."""
    labels = comparison.labels
    runs = table(comparison.runs)
    named = [(label, *row) for label, row in zip(labels, runs.rows, strict=True)]
    figures = [(figure.name, *figure.cells()) for figure in comparison.figures]
    found = [Table(("", *runs.columns), named, (0, 1, 2)), Table(("", *labels), figures)]
    rows = [(name, *map(_plain, values)) for name, values in comparison.differences.items()]
    if rows:
        found.append(Table(("what differs", *labels), rows, range(len(labels) + 1)))
    return found


def comparison_page(comparison: Comparison, written: str) -> str:
    """Return the page. written: its time as text."""
    labels = comparison.labels
    return render_page(
        "comparison.html.jinja",
        title=" and ".join(labels) if len(labels) < 3 else f"{len(labels)} runs",
        tables=tables(comparison),
        pictures=[
            draw([chart], chart.title, in_page=True) for chart in charts(comparison.runs, labels)
        ],
        notes=comparison.notes,
        written=written,
    )


def compare_json(comparison: Comparison) -> dict[str, Any]:
    """Return the content of the tables."""
    named = zip(comparison.labels, comparison.runs, strict=True)
    runs = []
    for label, run in named:
        about = {
            "label": label,
            "run": str(run.folder),
            "state": run.state,
            "step": run.step,
            "steady_rows": len(steady(run)),
        }
        runs.append(about)
    return {
        "runs": runs,
        "figures": {figure.name: figure.values for figure in comparison.figures},
        "steps": comparison.steps,
        "differences": comparison.differences,
        "notes": comparison.notes,
    }


def _differences(runs: Sequence[Run]) -> dict[str, tuple[Any, ...]]:
    """Return config keys first, in the order of the file, then circumstances that may explain a
    difference.
    """
    have_configs = all(run.config is not None for run in runs)
    have_attempts = all(run.attempts for run in runs)
    sides = []
    for run in runs:
        side: dict[str, Any] = {}
        if have_configs:
            side |= run.config or {}
        if have_attempts:
            side |= _circumstances(run.attempts[-1])
        # It always differs.
        side.pop("job.dump_folder", None)
        sides.append(side)
    differing = {}
    for name in dict.fromkeys(name for side in sides for name in side):
        values = tuple(side.get(name) for side in sides)
        if any(value != values[0] for value in values):
            differing[name] = values
    return differing


def _circumstances(attempt: Attempt) -> dict[str, Any]:
    git = attempt.get("git") or {}
    variables = attempt.get("environment") or {}
    return {
        "world_size": attempt.get("ranks"),
        "device": attempt.get("device"),
        "host": attempt.get("host"),
        "git commit": str(git["commit"])[:12] if git.get("commit") else None,
        "git dirty": git.get("dirty"),
        **{
            f"version of {name}": version
            for name, version in (attempt.get("versions") or {}).items()
        },
        **{name: value for name, value in variables.items() if not _IRRELEVANT.fullmatch(name)},
    }


def _notes(runs: Sequence[Run], labels: Sequence[str], common: bool) -> Iterator[str]:
    named = list(zip(labels, runs, strict=True))
    if not common:
        yield (
            "no step was logged by all runs, so no losses are compared: metrics.log_freq decides "
            "which are logged"
        )
    sizes = {}
    for name, run in named:
        size = _tokens_per_step(run)
        if size:
            sizes[name] = size
    if len(set(sizes.values())) > 1:
        said = ", ".join(f"{name} {size:,.0f}" for name, size in sizes.items())
        yield f"tokens per step differ ({said}): equal steps are not equal tokens"
    without = [str(run.folder) for run in runs if run.config is None]
    if without and len(runs) > 1:
        yield f"configs are not compared: no config.toml in {', '.join(without)}"
    for run in runs:
        if run.reason:
            yield f"{run.folder}: {state_words(run)}: {run.reason}"
        ranks = list(dict.fromkeys(str(attempt.get("ranks")) for attempt in run.attempts))
        if len(ranks) > 1:
            yield (
                f"{run.folder}: ran on {', then '.join(ranks)} ranks; its tokens/s is the median "
                "over all of them"
            )
        if len({attempt.get("config") for attempt in run.attempts}) > 1:
            yield f"{run.folder}: its config changed when it was resumed; the last one is compared"
        if not steady(run):
            yield f"{run.folder}: no tokens/s and MFU: only first rows exist, which are not counted"


def _tokens_per_step(run: Run) -> float | None:
    """Return the tokens between the last two training rows, per step."""
    rows: list[Row] = [{"step": 0.0, "tokens_seen": 0.0}]
    rows += [row for row in run.training if "tokens_seen" in row]
    first = rows[-2:][0]
    last = rows[-1]
    steps = last["step"] - first["step"]
    return (last["tokens_seen"] - first["tokens_seen"]) / steps if steps > 0 else None


def _plain(value: Any) -> str:
    if value is None:
        return "not set"
    return str(value).lower() if isinstance(value, bool) else str(value)
