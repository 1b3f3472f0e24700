#!/usr/bin/env python
"""Compare speed, memory and losses of one config at four optimisation levels.

usage: python -m benchmarks.levels CONFIG --out FOLDER [--skip LEVEL] [--section.key=VALUE ...]

All runs start from the same weights and read the same text. Repeats of the levels alternate, and
each repeat starts with another level, so that ratios compare runs of one repeat. Finished runs in
FOLDER are kept: the same command makes the missing ones. FOLDER/levels.json has the figures.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from titanlite.cli.run_figures import NONE, number, to_json
from titanlite.config.errors import ConfigError, refuse
from titanlite.config.load import read
from titanlite.config.toml import quote
from titanlite.contrib.lab.members import Member, MemberError, check_members, run_members
from titanlite.contrib.processes import tell
from titanlite.dist.count_gpus import count_gpus
from titanlite.resolve.load import resolve
from titanlite.runs.config_changes import config_values
from titanlite.runs.read import Row, Run, read_run
from titanlite.runs.record import CONFIG
from titanlite.runs.text_tables import Table, render
from titanlite.utils import atomic_write

RESULTS = "levels.json"
#: Name of a level → the keys that it switches on beside those before it.
LEVELS = {
    "default": (),
    "compile": ("training.compile",),
    "float8": ("float8.enable_float8_linear",),
    "float8-all-gather": (
        "float8.enable_fsdp_float8_all_gather",
        "float8.precompute_float8_dynamic_scale_for_fsdp",
    ),
}
SWITCHES = tuple(key for adds in LEVELS.values() for key in adds)
#: Flags of every run: they save time, and keep all files in the folder of the run.
COMMON = (
    "--metrics.log_freq=1",
    "--checkpoint.enable_checkpoint=false",
    "--checkpoint.folder=checkpoint",
    "--validation.enable=false",
    "--profiling.enable_profiling=false",
    "--metrics.enable_tensorboard=false",
    "--metrics.trackers=[]",
)


def finite(rows: Iterable[Row], name: str) -> list[float]:
    """Return the finite values of a figure."""
    return [row[name] for row in rows if name in row and math.isfinite(row[name])]


def main(words: Sequence[str]) -> int:
    """Run the levels; return the exit code."""
    parser = argparse.ArgumentParser(prog="benchmarks.levels", allow_abbrev=False)
    parser.add_argument("config")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--skip", action="append", default=[], choices=LEVELS)
    for name, default in {"steps": 30, "warmup": 10, "repeats": 3, "ranks": 1}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    arguments, flags = parser.parse_known_args(words)
    levels = levels_of(arguments.config, arguments.skip)
    out, ranks = arguments.out, arguments.ranks
    try:
        common = common_flags(next(iter(levels.values())), flags, arguments.steps, ranks)
        members = {
            (name, repeat): Member(f"{name}-{repeat}", [*own, *common])
            for repeat in range(1, arguments.repeats + 1)
            for name, own in levels.items()
        }
        check_members([members[name, 1] for name in levels], [], out / "runs", ranks)
        finished = make_runs(members, out / "runs", ranks, len(levels))
    except (ConfigError, MemberError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if not finished:
        return 1
    runs = [measure(run, *key, arguments.warmup) for key, run in finished.items()]
    rows = summarize(list(levels), runs)
    results = {
        "steps": arguments.steps,
        "config": {key[0]: config_of(run) for key, run in finished.items()},
        "levels": [asdict(row) for row in rows],
        "runs": [asdict(run) for run in runs],
    }
    atomic_write(out / RESULTS, to_json(results) + "\n")
    print(render(table(rows, arguments.steps, arguments.repeats)))
    return int(len(finished) < len(members))


def levels_of(config: str, skipped: Sequence[str]) -> dict[str, list[str]]:
    """Return the flags of each level."""
    found = {}
    on: list[str] = []
    for name, adds in LEVELS.items():
        on += adds
        switches = [f"--{key}={quote(key in on)}" for key in SWITCHES]
        if name not in skipped:
            found[name] = ["--job.config_file", config, *switches]
    return found


def common_flags(level: Sequence[str], flags: Sequence[str], steps: int, ranks: int) -> list[str]:
    """Return the flags of all runs: the first `steps` of the config's own schedule."""
    base, problems = read([*level, *flags])
    refuse(problems)
    total = resolve(base, ranks)[1].schedule.total_steps
    found = [f"--training.steps={steps}", f"--lr_scheduler.total_steps={total}", *COMMON, *flags]
    return found if count_gpus() else [*found, "--float8.emulate=true"]


def make_runs(
    members: Mapping[tuple[str, int], Member], folder: Path, ranks: int, levels: int
) -> dict[tuple[str, int], Run]:
    """Make the missing runs, each repeat from another level; return all that are done. A run that
    fails is the last one.
    """
    finished = {}
    keys = list(members)
    for index in range(len(keys)):
        repeat, place = divmod(index, levels)
        key = keys[repeat * levels + (repeat + place) % levels]
        member = members[key]
        label = f"run {index + 1} of {len(keys)}: {key[0]}, repeat {key[1]}"
        (result,) = run_members([member], [], folder, ranks)
        if result.state != "done":
            tell(f"{label} failed with {result.reason or result.state}; --skip leaves a level out")
            break
        finished[key] = read_run(folder / member.name)
        tell(f"{label} is done")
    return finished


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


def config_of(run: Run) -> dict[str, Any]:
    """Return the resolved config of a run by `section.key`."""
    return config_values((run.folder / CONFIG).read_text(encoding="utf-8"))


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


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
