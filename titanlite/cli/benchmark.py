"""`titanlite benchmark`: speed, memory and losses of one config at several optimisation levels."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from titanlite import exit_codes, torchrun
from titanlite.cli import at_least, refuse_keys
from titanlite.cli import benchmark_report as report
from titanlite.cli.benchmark_levels import (
    LEVELS,
    SAVES,
    SWITCHES,
    BenchmarkError,
    Level,
    Machine,
    check_levels,
    common_flags,
    differences,
    make_levels,
    must_count_steps,
    probe,
    without,
    write_levels,
)
from titanlite.cli.parser import Commands, new_command
from titanlite.cli.plots import PlotsMissing
from titanlite.cli.processes import Stopped, last_lines, stoppable, tell, train
from titanlite.cli.run_figures import to_json
from titanlite.config.errors import ConfigError
from titanlite.config.load import find_config, read
from titanlite.runs import provenance
from titanlite.runs.read import Run, RunError, read_run
from titanlite.utils import atomic_write, render, say

#: Keys that the command sets itself -> the hint for a flag of that name.
OWN = {
    "job.config_file": "name the config first, without a flag",
    "job.dump_folder": "every run has its own folder; --out names the folder above them",
    **dict.fromkeys(
        ("training.steps", "training.tokens", "training.epochs"),
        "use --steps, the length of each run",
    ),
    "checkpoint.enable_checkpoint": "the runs are short and keep no checkpoints",
    **dict.fromkeys(SWITCHES, "the levels differ in this key: use --skip and --overlay"),
}
_RESULTS = "benchmark.json"
_PAGE = "benchmark.md"
_LOSSES = "losses.png"
_SPEEDS = "throughput.png"

_EPILOG = """\
examples:
  titanlite benchmark debug_model.toml --steps 20 --warmup 5
  titanlite benchmark llama3_8b.toml --ranks 8 --repeats 5 --training.seq_len 4096
  titanlite benchmark llama3_8b.toml --overlay no-ac=no_ac.toml --skip float8

Further --section.key VALUE flags apply to every level, as for train.py. All levels are checked
before the first run. Finished runs in FOLDER are kept: after a failure or Ctrl-C the same command
makes the missing runs.
Without a GPU float8 is emulated: its losses are meaningful, its speed is not.

Exit status: 0 if all runs finished, 1 if one failed, 2 if the config or the command line is wrong,
130 after Ctrl-C."""


def add_command(commands: Commands) -> None:
    """Add the command to argparse."""
    width = max(len(level.name) for level in LEVELS)
    levels = []
    for level in LEVELS:
        about = f"+ {level.about}" if level.adds else level.about
        levels.append(f"  {level.name:<{width}}  {about}")
    parser = new_command(
        commands,
        _run,
        "benchmark",
        "compare speed, memory and losses with compile, float8 and other settings",
        "Train CONFIG at four optimisation levels, in turn, from the same weights on "
        "the same text:\n\n" + "\n".join(levels) + "\n\nPrints and writes speed, memory and "
        "losses of each level, and its speed over the first level's.",
        _EPILOG,
    )
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.set_defaults(takes_keys=True)
    add = parser.add
    add("config", "TOML file; also looked up in train_configs/", "CONFIG")
    overlay = "add a level: FILE over the first level; repeatable"
    add("--overlay", overlay, "NAME=FILE.toml", action="append", default=[])
    add("--skip", "leave a level out; repeatable", "LEVEL", action="append", default=[])
    add("--steps", "steps of a run (default: 30)", "N", type=at_least(1), default=30)
    warmup = "first steps not counted for speed (default: 10)"
    add("--warmup", warmup, "N", type=at_least(1), default=10)
    add("--repeats", "runs of each level (default: 3)", "N", type=at_least(1), default=3)
    add("--ranks", "processes (default: one per GPU; without a GPU 2)", "N", type=at_least(1))
    add("--out", "output folder (default: ./outputs/benchmark/NAME-OF-CONFIG)", "FOLDER", type=Path)
    add("--json", "print the results as JSON")


def _run(arguments: argparse.Namespace) -> tuple[str, int]:
    benchmark = _benchmark_of(arguments)
    out = benchmark.out
    try:
        benchmark.find_finished()
        write_levels(benchmark.all_levels, out / "levels")
        code = benchmark.make_runs()
        return benchmark.finish(arguments.json), code
    except OSError as error:
        raise BenchmarkError(
            f"cannot write to {out}: {error.strerror or error}; name another with --out"
        ) from None


def _benchmark_of(arguments: argparse.Namespace) -> Benchmark:
    """Return the benchmark of a command line; all its levels are checked.

    Raises BenchmarkError and ConfigError.
    """
    steps = arguments.steps
    warmup = arguments.warmup
    if steps <= warmup:
        raise BenchmarkError(f"--steps {steps}: no step is left to count after --warmup {warmup}")
    flags = arguments.flags
    refuse_keys(flags, OWN)
    config = find_config(arguments.config)
    if config is None:
        raise ConfigError(read([f"--job.config_file={arguments.config}"])[1])
    levels = make_levels(config, arguments.overlay)
    chosen = without(levels, arguments.skip)
    machine = probe()
    ranks = arguments.ranks or machine.gpus or 2
    if machine.gpus and ranks > machine.gpus:
        raise BenchmarkError(
            f"--ranks {ranks}: each rank needs its own GPU, and this machine has {machine.gpus}"
        )
    # A refused benchmark writes nothing to its folder.
    with tempfile.TemporaryDirectory() as scratch:
        write_levels(levels, Path(scratch))
        common = common_flags(f"{scratch}/{levels[0].name}.toml", flags, steps, ranks)
        checked = check_levels(chosen, Path(scratch), common, ranks, machine)
    must_count_steps(checked, steps, warmup)
    return Benchmark(
        title=config.name,
        levels=checked,
        all_levels=levels,
        common=common,
        machine=machine,
        ranks=ranks,
        out=arguments.out or Path("outputs", "benchmark", config.stem),
        steps=steps,
        warmup=warmup,
        repeats=arguments.repeats,
    )


@dataclass
class Benchmark:
    """All runs of a benchmark."""

    title: str
    #: Those that run, the baseline first.
    levels: Sequence[Level]
    #: Also those that are skipped: others may extend them.
    all_levels: Sequence[Level]
    common: Sequence[str]
    machine: Machine
    ranks: int
    out: Path
    steps: int
    warmup: int
    repeats: int
    #: Finished runs by level and number.
    finished: dict[tuple[str, int], Run] = field(default_factory=dict)

    def in_turn(self) -> list[tuple[Level, int]]:
        """Return level and number of all runs, in order. Each repeat starts with another level."""
        count = len(self.levels)
        runs = []
        for repeat in range(self.repeats):
            for i in range(count):
                runs.append((self.levels[(repeat + i) % count], repeat + 1))
        return runs

    def folder(self, level: Level, repeat: int) -> Path:
        return self.out / "runs" / f"{level.name}-{repeat}"

    def find_finished(self) -> None:
        """Find the runs in the folder that need no repeat.

        Raises BenchmarkError if they are of another benchmark.
        """
        here = {
            "device": self.machine.device,
            "world_size": self.ranks,
            "versions": provenance.versions(),
        }
        for level, repeat in self.in_turn():
            folder = self.folder(level, repeat)
            done = _finished_run(folder)
            if done is None:
                continue
            before = {**(done.config or {}), **_conditions(done.attempts[-1])}
            before.pop("job.dump_folder", None)
            _must_be_same(folder, before, {**level.values, **_conditions(here)})
            self.finished[level.name, repeat] = done

    def make_runs(self) -> int:
        """Make the missing runs. Return the exit code. Raises OSError."""
        slots = self.in_turn()
        if self.finished:
            tell(f"{len(self.finished)} of {len(slots)} runs are in {self.out} already")
        try:
            with stoppable():
                for level, repeat in slots:
                    if (level.name, repeat) not in self.finished and not self._make(level, repeat):
                        return exit_codes.ERROR
        except Stopped as stop:
            tell(f"stopped by {stop}; the same command makes the missing runs")
            return 128 + stop.number
        return exit_codes.DONE

    def _make(self, level: Level, repeat: int) -> bool:
        """Make one run. Return whether it is finished."""
        folder = self.folder(level, repeat)
        number = len(self.finished) + 1
        label = f"run {number} of {len(self.levels) * self.repeats}: {level.name}, repeat {repeat}"
        folder.mkdir(parents=True, exist_ok=True)
        console = folder / "console.log"
        tell(f"{label} starts; its output: {console}")
        config = f"--job.config_file={self.out / 'levels' / level.name}.toml"
        arguments = [config, *self.common, *level.flags, f"--job.dump_folder={folder}"]
        device_type = "cuda" if self.machine.gpus else "cpu"
        # A run that was stopped has left a checkpoint there, and must not resume from it.
        shutil.rmtree(folder / SAVES, ignore_errors=True)
        code = train(torchrun.command(self.ranks, ["train", *arguments]), console, device_type)
        shutil.rmtree(folder / SAVES, ignore_errors=True)
        done = None if code else _finished_run(folder)
        if done is None:
            why = f"left no metrics of {self.steps} steps in {folder}"
            if code:
                why = f"failed with exit code {code}"
            tell("\n    ".join([f"{label} {why}. Its last lines:", *last_lines(console)]))
            tell(
                f"the whole output: {console}; the same command tries again, --skip {level.name} "
                "leaves it out"
            )
            return False
        self.finished[level.name, repeat] = done
        figures = report.measure(done, level.name, repeat, self.warmup)
        tell(
            f"{label}: {figures.tokens_per_second:,.0f} tokens/s, loss "
            f"{figures.losses[self.steps]:.4f}"
        )
        return True

    def _notes(self, unlike: Mapping[str, Sequence[str]], spread: float | None) -> list[str]:
        base = self.levels[0].name
        notes = [
            f"{name} differs from {base} in {', '.join(keys)}: losses not compared"
            for name, keys in unlike.items()
        ]
        emulated = [
            one.name
            for one in self.levels
            if one.values["float8.emulate"] and one.values[SWITCHES[1]]
        ]
        if emulated:
            notes.append(
                f"float8 is emulated in {', '.join(emulated)}: compare their losses, not their "
                "speed"
            )
        if not self.machine.gpus:
            notes.append(
                "memory on a CPU is the resident memory of rank 0's process, libraries included"
            )
        if spread is not None:
            notes.append(f"between repeats of {base} losses differ by at most {spread:.2g}")
        return notes

    def finish(self, as_json: bool) -> str:
        """Write the results, the page and the pictures; return the text for standard output.

        Raises OSError.
        """
        base, *others = self.levels
        unlike = {}
        for level in others:
            keys = differences(base.task, level.task)
            if keys:
                unlike[level.name] = keys
        runs = self._figures()
        levels = report.summarize([level.name for level in self.levels], runs, unlike)
        notes = self._notes(unlike, levels[0].loss_spread)
        command = provenance.command(["titanlite", *sys.argv[1:]])
        results = to_json(self._results(command, levels, runs, notes))
        atomic_write(self.out / _RESULTS, results + "\n")
        pictures = self._draw(levels, runs)
        head = [*self._head(), ""]
        table = report.table(levels, self.steps, self.repeats)
        below = ["", *(f"note: {note}" for note in notes)]
        text = "\n".join([*head, render(table, False), *below])
        page = [
            f"# Benchmark: {self.title}",
            f"`{' '.join(command)}`",
            f"```\n{text.rstrip()}\n```",
            "\n".join(f"- {level.name}: {level.about}" for level in self.levels),
            "\n".join(f"![{Path(name).stem}]({name})" for name in pictures),
        ]
        atomic_write(self.out / _PAGE, "\n\n".join(page) + "\n")
        if as_json:
            return results
        written = ", ".join(str(self.out / name) for name in (_PAGE, _RESULTS, *pictures))
        return "\n".join(["", *head, render(table), *below, "", f"written: {written}"])

    def _figures(self) -> list[report.RunFigures]:
        """Return the figures of the finished runs, in the order of the runs."""
        found = []
        for level, repeat in self.in_turn():
            run = self.finished.get((level.name, repeat))
            if run is not None:
                found.append(report.measure(run, level.name, repeat, self.warmup))
        return found

    def _head(self) -> list[str]:
        versions = provenance.versions()
        about = ", ".join(f"{name} {versions[name]}" for name in ("titanlite", "torch", "python"))
        return [
            f"{self.ranks} x {self.machine.device}, {os.cpu_count()} processor cores; {about}",
            f"{self.steps} steps a run, the first {self.warmup} not counted; medians of "
            f"{self.repeats} repeats in turn",
        ]

    def _results(
        self,
        command: Sequence[str],
        levels: Sequence[report.LevelFigures],
        runs: Sequence[report.RunFigures],
        notes: Sequence[str],
    ) -> dict[str, Any]:
        return {
            "format": 2,
            "title": self.title,
            "command": command,
            "versions": provenance.versions(),
            "hardware": {
                "device": self.machine.device,
                "world_size": self.ranks,
                "cores": os.cpu_count(),
            },
            "steps": self.steps,
            "warmup": self.warmup,
            "repeats": self.repeats,
            "levels": [asdict(level) for level in levels],
            "runs": [asdict(run) for run in runs],
            "notes": notes,
            "config": {level.name: level.values for level in self.levels},
        }

    def _draw(
        self, levels: Sequence[report.LevelFigures], runs: Sequence[report.RunFigures]
    ) -> list[str]:
        """Draw the pictures; return their names, none without matplotlib. Raises OSError."""
        if not runs:
            return []
        first = {}
        for level in self.levels:
            if (level.name, 1) in self.finished:
                first[level.name] = self.finished[level.name, 1]
        try:
            report.draw(levels, runs, first, self.out / _LOSSES, self.out / _SPEEDS)
        except PlotsMissing as error:
            say(f"{_LOSSES} and {_SPEEDS} are not drawn: {error}")
            return []
        return [_LOSSES, _SPEEDS]


def _must_be_same(folder: Path, before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Raise BenchmarkError if a run was made with other values."""
    names = differences(before, now)
    if not names:
        return
    lines = [f"{folder} is a run of another benchmark:"]
    for name in names[:8]:
        values = f"{json.dumps(before.get(name))} there, {json.dumps(now.get(name))} now"
        lines.append(f"  {name}: {values}")
    raise BenchmarkError("\n".join([*lines, "name another folder with --out"]))


def _finished_run(folder: Path) -> Run | None:
    """Return the run in a folder if it was trained to its end."""
    try:
        found = read_run(folder)
    except (RunError, OSError):
        return None
    if found.state == "done" and found.step == found.steps and found.training:
        return found
    return None


def _conditions(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return all that must not change between the runs of a benchmark, from the record of an
    attempt.
    """
    versions = {
        f"version of {name}": record.get("versions", {}).get(name)
        for name in ("titanlite", "torch")
    }
    return {"ranks": record.get("world_size"), "device": record.get("device"), **versions}
