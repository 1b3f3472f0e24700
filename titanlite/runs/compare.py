"""`titanlite compare`: the figures of several runs side by side, and what differs in how they were run."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, Literal

from titanlite.metrics.jsonl import FILE as METRICS
from titanlite.metrics.jsonl import json_value
from titanlite.runs.attempts import RunError
from titanlite.runs.list import NONE, last, state_words
from titanlite.runs.read import Row, Run, read_run
from titanlite.utils import Table, human_time, render

#: Equal steps at which losses are shown.
STEPS_SHOWN = 5

#: Of the environment, what differs between any two runs and changes neither speed nor numbers.
_NO_MATTER = re.compile(r"(SLURM|TORCHELASTIC)_.*|(LOCAL_|GROUP_)?WORLD_SIZE|.*_(ID|PORT|PID|FILE|DIR|ADDR)")


@dataclass(frozen=True)
class Figure:
    """One line of the comparison: a value per run, and how the others relate to the first."""

    name: str
    values: tuple[float | None, ...]
    form: str
    #: What stands beside the values of the second and later runs.
    relation: Literal["ratio", "difference", None]

    def cells(self) -> list[str]:
        """The values as text, e.g. `1,234 (1.05×)` or `4.5621 (+0.0012)`."""
        first = self.values[0]
        return [self._cell(value, first if i else None) for i, value in enumerate(self.values)]

    def _cell(self, value: float | None, first: float | None) -> str:
        if value is None:
            return NONE
        text = format(value, self.form)
        if first is None or self.relation is None or not (math.isfinite(value) and math.isfinite(first)):
            return text
        if self.relation == "difference":
            return f"{text} ({format(value - first, '+' + self.form)})"
        return f"{text} ({value / first:.2f}×)" if first else text


@dataclass(frozen=True)
class Difference:
    """Something that is not the same in all runs; None: it is not set there."""

    name: str
    values: tuple[Any, ...]

    def cells(self) -> list[str]:
        return ["not set" if value is None else _plain(value) for value in self.values]


@dataclass(frozen=True)
class Comparison:
    """What `compare` found."""

    runs: tuple[Run, ...]
    #: A short name per run.
    labels: tuple[str, ...]
    figures: tuple[Figure, ...]
    #: Steps that all runs logged, the last of them last; `figures` has a line for each.
    steps: tuple[int, ...]
    differences: tuple[Difference, ...]
    notes: tuple[str, ...]


def read_runs(paths: Sequence[Path]) -> list[Run]:
    """The runs to compare. Raises RunError for what is no run, has no numbers yet, or is named twice."""
    runs = [read_run(path) for path in paths]
    places = [run.folder.resolve() for run in runs]
    for i, run in enumerate(runs):
        if places[i] in places[:i]:
            raise RunError(f"{run.folder}: named twice; a run compared with itself shows nothing")
        if not run.training:
            raise RunError(
                f"{run.folder}: {METRICS} has no training step yet; wait for its first logged step, or leave it out"
            )
    return runs


def compare(runs: Sequence[Run]) -> Comparison:
    """Put runs side by side. Each has at least one training row."""
    runs = tuple(runs)
    labels = short_names([run.folder for run in runs])
    losses = [{int(row["step"]): row["loss"] for row in run.training} for run in runs]
    common = sorted(set.intersection(*map(set, losses)))
    steps = spread(common, STEPS_SHOWN)
    rows = [steady(run) for run in runs]

    def over(pick: Callable[[list[float]], float], name: str, source: Sequence[Sequence[Row]]) -> tuple:
        values = ([row[name] for row in part if name in row and math.isfinite(row[name])] for part in source)
        return tuple(pick(found) if found else None for found in values)

    training = [run.training for run in runs]
    figures = [
        Figure("tokens/s", over(median, "total_tps", rows), ",.0f", "ratio"),
        Figure("tokens/s per device", over(median, "tps", rows), ",.0f", "ratio"),
        Figure("MFU %", over(median, "mfu", rows), ".2f", "ratio"),
        Figure("memory GiB, peak", over(max, "memory_gib", training), ".2f", "ratio"),
        Figure("reserved GiB, peak", over(max, "reserved_gib", training), ".2f", "ratio"),
        *(
            Figure(f"loss at step {step:,}", tuple(loss[step] for loss in losses), ".4f", "difference")
            for step in steps
        ),
        *_validation(runs),
    ]
    return Comparison(
        runs,
        labels,
        tuple(figure for figure in figures if any(value is not None for value in figure.values)),
        tuple(steps),
        tuple(_differences(runs)),
        tuple(_notes(runs, labels, bool(common))),
    )


def steady(run: Run) -> list[Row]:
    """Training rows without the first two of each attempt, which pay for compilation, allocation and warm caches.

    Only the first is left out where an attempt has but two.
    """
    return [row for part in run.segments() for row in (part[2:] if len(part) > 2 else part[1:])]


def _validation(runs: Sequence[Run]) -> Iterator[Figure]:
    """The final validation losses; those of different steps are not set against each other, equal steps are."""
    losses = [{int(row["step"]): row["validation_loss"] for row in run.validations} for run in runs]
    finals = tuple(float(max(steps)) if steps else None for steps in losses)
    same = len(set(finals)) == 1
    if not same:
        shared = set.intersection(*map(set, losses))
        if shared:
            values = tuple(found[max(shared)] for found in losses)
            yield Figure(f"validation loss at step {max(shared):,}", values, ".4f", "difference")
        yield Figure("final validation, step", finals, ",.0f", None)
    yield Figure(
        "final validation loss",
        tuple(last(run, "validation_loss") for run in runs),
        ".4f",
        "difference" if same else None,
    )


def spread(steps: Sequence[int], count: int) -> list[int]:
    """At most `count` of the steps at equal distances; the last is always among them."""
    if len(steps) <= count:
        return list(steps)
    return [steps[round((i + 1) * len(steps) / count) - 1] for i in range(count)]


def short_names(paths: Sequence[Path]) -> tuple[str, ...]:
    """The shortest ends of the paths that tell them apart."""
    parts = [path.resolve().parts for path in paths]
    for length in range(1, max(map(len, parts)) + 1):
        names = ["/".join(part[-length:]) for part in parts]
        if len(set(names)) == len(names):
            break
    return tuple(names)


def tables(comparison: Comparison) -> list[Table]:
    """What was compared, the figures, and what differs."""
    labels = comparison.labels
    runs = [
        (
            label,
            str(run.folder),
            state_words(run),
            _steps(run),
            NONE if run.duration is None else human_time(run.duration),
        )
        for label, run in zip(labels, comparison.runs, strict=True)
    ]
    figures = [(figure.name, *figure.cells()) for figure in comparison.figures]
    found = [
        Table(("run", "folder", "state", "steps", "duration"), runs, left=(0, 1, 2)),
        Table(("", *labels), figures),
    ]
    if comparison.differences:
        rows = [(difference.name, *difference.cells()) for difference in comparison.differences]
        found.append(Table(("what differs", *labels), rows, left=range(len(labels) + 1)))
    return found


def compare_text(comparison: Comparison, terminal: bool) -> str:
    parts = [render(table, terminal) for table in tables(comparison)]
    parts += ["\n".join(f"note: {note}" for note in comparison.notes)] if comparison.notes else []
    return "\n\n".join(parts)


def compare_json(comparison: Comparison) -> dict[str, Any]:
    """What the tables hold; not finite numbers are strings as in metrics.jsonl."""
    runs = zip(comparison.labels, comparison.runs, strict=True)
    return {
        "runs": [
            {
                "label": label,
                "run": str(run.folder),
                "state": run.state,
                "step": run.step,
                "steady_rows": len(steady(run)),
            }
            for label, run in runs
        ],
        "figures": {figure.name: [json_value(value) for value in figure.values] for figure in comparison.figures},
        "steps": list(comparison.steps),
        "differences": {d.name: [_plain(v) if _is_odd(v) else v for v in d.values] for d in comparison.differences},
        "notes": list(comparison.notes),
    }


def _steps(run: Run) -> str:
    return f"{run.step:,}" if run.steps is None else f"{run.step:,} of {run.steps:,}"


def _differences(runs: Sequence[Run]) -> list[Difference]:
    """Config keys first, in the order of the file, then what else may explain a difference."""
    configs = [run.config for run in runs if run.config is not None]
    found: list[Difference] = []
    if len(configs) == len(runs):
        # Where a run is written always differs, and the table of runs says it.
        found = _unequal([{k: v for k, v in config.items() if k != "job.dump_folder"} for config in configs])
    if all(run.attempts for run in runs):
        found += _unequal([_circumstances(run.attempts[-1]) for run in runs])
    return found


def _unequal(sides: Sequence[Mapping[str, Any]]) -> list[Difference]:
    names = dict.fromkeys(name for side in sides for name in side)
    values = ((name, tuple(side.get(name) for side in sides)) for name in names)
    return [Difference(name, found) for name, found in values if any(v != found[0] for v in found[1:])]


def _circumstances(attempt: Mapping[str, Any]) -> dict[str, Any]:
    found = {name: attempt.get(name) for name in ("world_size", "device", "host")}
    git = attempt.get("git") or {}
    found |= {"git commit": str(git["commit"])[:12] if git.get("commit") else None, "git dirty": git.get("dirty")}
    found |= {f"version of {name}": version for name, version in (attempt.get("versions") or {}).items()}
    variables = attempt.get("environment") or {}
    return found | {name: value for name, value in variables.items() if not _NO_MATTER.fullmatch(name)}


def _notes(runs: Sequence[Run], labels: Sequence[str], common: bool) -> list[str]:
    notes = [f"{run.folder}: {state_words(run)}: {run.reason}" for run in runs if run.reason]
    if not common:
        logged = "; ".join(f"{name} {_some_steps(run)}" for name, run in zip(labels, runs, strict=True))
        notes.append(
            f"no step was logged by all runs, so no losses are compared ({logged}): metrics.log_freq sets them"
        )
    sizes = {name: _tokens_per_step(run) for name, run in zip(labels, runs, strict=True)}
    if len({size for size in sizes.values() if size}) > 1:
        said = ", ".join(f"{name} {size:,.0f}" for name, size in sizes.items() if size)
        notes.append(f"tokens per step differ ({said}): equal steps are not equal tokens")
    without = [str(run.folder) for run in runs if run.config is None]
    if without and len(runs) > 1:
        notes.append(f"configs are not compared: no config.toml in {', '.join(without)}")
    for run in runs:
        sizes_seen = list(dict.fromkeys(attempt.get("world_size") for attempt in run.attempts))
        if len(sizes_seen) > 1:
            ranks = ", then ".join(map(str, sizes_seen))
            notes.append(f"{run.folder}: ran on {ranks} ranks; its tokens/s is the median over all of them")
        if len({attempt.get("config") for attempt in run.attempts}) > 1:
            notes.append(f"{run.folder}: its config changed when it was resumed; the last one is compared")
    unsteady = [name for name, run in zip(labels, runs, strict=True) if not steady(run)]
    if unsteady:
        notes.append(f"no tokens/s and MFU of {', '.join(unsteady)}: only first rows, which are not counted, are there")
    return notes


def _some_steps(run: Run) -> str:
    steps = [f"{row['step']:.0f}" for row in run.training]
    return ", ".join(steps) if len(steps) <= 4 else f"{', '.join(steps[:3])}, …, {steps[-1]}"


def _tokens_per_step(run: Run) -> float | None:
    """Of the last training row: tokens since the row before it, by the steps between them."""
    rows = [row for row in run.training if "tokens_seen" in row]
    if not rows:
        return None
    before = rows[-2] if len(rows) > 1 else {"step": 0.0, "tokens_seen": 0.0}
    steps = rows[-1]["step"] - before["step"]
    return (rows[-1]["tokens_seen"] - before["tokens_seen"]) / steps if steps > 0 else None


def _is_odd(value: Any) -> bool:
    """Whether JSON has no such value: TOML's dates, and numbers that are not finite, also inside lists."""
    if isinstance(value, list):
        return any(map(_is_odd, value))
    if isinstance(value, dict):
        return any(map(_is_odd, value.values()))
    return not isinstance(value, str | int | float | bool | None) or (
        isinstance(value, float) and not math.isfinite(value)
    )


def _plain(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
