"""`titanlite benchmark`: speed, memory and losses of one config at several optimisation levels."""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from titanlite import exit_codes
from titanlite.config.errors import ConfigError
from titanlite.config.load import find_config, read
from titanlite.metrics.jsonl import json_value
from titanlite.runs import provenance
from titanlite.runs.read import Run, RunError, read_run
from titanlite.tools import benchmark_levels
from titanlite.tools import benchmark_report as report
from titanlite.tools.benchmark_levels import LEVELS, BenchmarkError, Machine, Planned, task_differences, without_folder
from titanlite.tools.plots import PlotsMissing
from titanlite.tools.processes import Stopped, last_lines, run, stoppable, training_command, training_environment
from titanlite.utils import escape, human_time, render

_RESULTS, _PAGE, _LOSSES, _SPEEDS = "benchmark.json", "benchmark.md", "losses.png", "throughput.png"

_EPILOG = """\
examples:
  titanlite benchmark debug_model.toml --steps 20 --warmup 5
  titanlite benchmark llama3_8b.toml --ranks 8 --repeats 5 --training.seq_len 4096
  titanlite benchmark llama3_8b.toml --overlay no-ac=no_ac.toml --skip float8 --skip float8-all-gather

Further --section.key VALUE flags apply to every level, as for train.py. All levels are checked before the first run.
Finished runs in FOLDER are kept: after a failure or Ctrl-C the same command makes the missing runs.
Without a GPU float8 is emulated: its losses are meaningful, its speed is not.

Exit status: 0 if all runs finished, 1 if one failed, 2 if the config or the command line is wrong, 130 after Ctrl-C."""


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command, and its other name `ladder`, to argparse."""
    width = max(len(level.name) for level in LEVELS)
    levels = "\n".join(f"  {level.name:<{width}}  {'+ ' if level.adds else ''}{level.about}" for level in LEVELS)
    parser = commands.add_parser(
        "benchmark",
        aliases=["ladder"],
        help="compare speed, memory and losses with compile, float8 and other settings",
        description="Train CONFIG at four optimisation levels, in turn, from the same weights on the same text:\n\n"
        f"{levels}\n\nPrints and writes speed, memory and losses of each level, and its speed over the first level's.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("config", metavar="CONFIG", help="TOML file; also looked up in train_configs/")
    add(
        "--overlay",
        action="append",
        default=[],
        metavar="NAME=FILE.toml",
        help="add a level: FILE over the first level; repeatable",
    )
    add("--skip", action="append", default=[], metavar="LEVEL", help="leave a level out; repeatable")
    add("--steps", type=int, default=30, metavar="N", help="steps of a run (default: 30)")
    add("--warmup", type=int, default=10, metavar="N", help="first steps not counted for speed (default: 10)")
    add("--repeats", type=int, default=3, metavar="N", help="runs of each level (default: 3)")
    add("--ranks", type=int, metavar="N", help="processes (default: one per GPU; without a GPU 2)")
    add("--out", type=Path, metavar="FOLDER", help="output folder (default: ./outputs/benchmark/NAME-OF-CONFIG)")
    add("--json", action="store_true", help="print the results as JSON")
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace, flags: list[str], _style: object) -> tuple[str, int]:
    _check_numbers(arguments)
    benchmark_levels.refuse_own_keys(flags)
    config = find_config(arguments.config)
    if config is None:
        raise ConfigError(read([f"--job.config_file={arguments.config}"])[1])
    levels = benchmark_levels.make_levels(config, arguments.overlay)
    names = [level.name for level in levels]
    if unknown := [name for name in arguments.skip if name not in names]:
        raise BenchmarkError(f"--skip {unknown[0]}: unknown level; the levels are {', '.join(names)}")
    if not (chosen := [level for level in levels if level.name not in arguments.skip]):
        raise BenchmarkError("--skip leaves no level")
    machine = benchmark_levels.probe()
    ranks = arguments.ranks or machine.gpus or 2
    if machine.gpus and ranks > machine.gpus:
        raise BenchmarkError(f"--ranks {ranks}: each rank needs its own GPU, and this machine has {machine.gpus}")
    out = arguments.out or Path("outputs", "benchmark", config.stem)
    with tempfile.TemporaryDirectory() as scratch:  # a refused benchmark writes nothing to `out`
        benchmark_levels.write_levels(levels, Path(scratch))
        common = benchmark_levels.common_flags(str(Path(scratch, levels[0].file)), flags, arguments.steps, ranks)
        planned = benchmark_levels.check_levels(chosen, Path(scratch), common, ranks, machine)
    benchmark_levels.check_logged_steps(planned, arguments.steps, arguments.warmup)
    sizes = arguments.steps, arguments.warmup, arguments.repeats
    benchmark = Benchmark(config.name, planned, common, machine, ranks, out, *sizes)
    benchmark.find_finished()
    try:
        benchmark_levels.write_levels(levels, out / "levels")
        code = benchmark.make_runs()
        return benchmark.finish(arguments.json), code
    except OSError as error:
        raise BenchmarkError(f"cannot write to {out}: {error.strerror or error}; name another with --out") from None


def _check_numbers(arguments: argparse.Namespace) -> None:
    for name in ("warmup", "repeats", "ranks"):
        value = getattr(arguments, name)
        if value is not None and value < 1:
            why = ": the first step compiles and allocates" if name == "warmup" else ""
            raise BenchmarkError(f"--{name} {value}: expected at least 1{why}")
    if arguments.steps <= arguments.warmup:
        raise BenchmarkError(f"--steps {arguments.steps}: no step is left to count after --warmup {arguments.warmup}")


@dataclass(frozen=True)
class Slot:
    """One run to make."""

    planned: Planned
    #: From 1.
    repeat: int

    @property
    def name(self) -> str:
        return self.planned.level.name

    @property
    def folder(self) -> str:
        return f"{self.name}-{self.repeat}"


def in_turn(planned: Sequence[Planned], repeats: int) -> list[Slot]:
    """All runs in their order. Each repeat starts with another level, so a drift of the machine favours none."""
    order = [(repeat, (repeat + i) % len(planned)) for repeat in range(repeats) for i in range(len(planned))]
    return [Slot(planned[level], repeat + 1) for repeat, level in order]


@dataclass
class Benchmark:
    """All runs of a benchmark. `planned`: the levels, the baseline first."""

    title: str
    planned: Sequence[Planned]
    common: Sequence[str]
    machine: Machine
    ranks: int
    out: Path
    steps: int
    warmup: int
    repeats: int
    #: Finished runs by the name of their folder.
    finished: dict[str, Run] = field(default_factory=dict)

    def find_finished(self) -> None:
        """Find the runs in the folder that need no repeat. Raises BenchmarkError if they are of another benchmark."""
        if self.out.exists() and not self.out.is_dir():
            raise BenchmarkError(f"{self.out} is not a folder; name another with --out")
        found = self._finished_runs()
        for slot in in_turn(self.planned, self.repeats):
            if slot.folder in found and (differences := self._differences(slot, found[slot.folder])):
                lines = [f"{self.out / 'runs' / slot.folder} is a run of another benchmark:"]
                lines += [f"  {line}" for line in differences[:8]]
                raise BenchmarkError("\n".join([*lines, "name another folder with --out"]))
        self.finished = found

    def _finished_runs(self) -> dict[str, Run]:
        slots = in_turn(self.planned, self.repeats)
        return {slot.folder: done for slot in slots if (done := self._done(slot)) is not None}

    def _done(self, slot: Slot) -> Run | None:
        """The run of a slot if it was trained to its end."""
        try:
            found = read_run(self.out / "runs" / slot.folder)
        except (RunError, OSError):
            return None
        return found if found.state == "done" and found.step == found.steps and found.training else None

    def _differences(self, slot: Slot, found: Run) -> list[str]:
        """Config, device, ranks and versions of a finished run against those of this benchmark."""
        before = {**without_folder(found.config or {}), **self._conditions(found.attempts[-1])}
        now = {**slot.planned.values, **self._conditions({**self._hardware(), "versions": provenance.versions()})}
        names = [name for name in {**before, **now} if before.get(name) != now.get(name)]
        return [f"{name}: {json.dumps(before.get(name))} there, {json.dumps(now.get(name))} now" for name in names]

    @staticmethod
    def _conditions(record: Mapping[str, Any]) -> dict[str, Any]:
        versions = {f"version of {name}": record.get("versions", {}).get(name) for name in ("titanlite", "torch")}
        return {"ranks": record.get("ranks"), "device": record.get("device"), **versions}

    def _hardware(self) -> dict[str, Any]:
        return {"device": self.machine.device, "ranks": self.ranks, "cores": os.cpu_count()}

    def make_runs(self) -> int:
        """Make the missing runs, and write the results after each. Returns the exit code. Raises OSError."""
        slots = in_turn(self.planned, self.repeats)
        missing = [slot for slot in slots if slot.folder not in self.finished]
        if self.finished:
            _log(f"{len(self.finished)} of {len(slots)} runs are in {self.out} already")
        began = time.monotonic()
        with stoppable():
            try:
                for i, slot in enumerate(missing):
                    label = (
                        f"run {len(slots) - len(missing) + i + 1} of {len(slots)}: {slot.name}, repeat {slot.repeat}"
                    )
                    if (figures := self._make(slot, label)) is None:
                        return exit_codes.ERROR
                    self._save()
                    mean, left = (time.monotonic() - began) / (i + 1), len(missing) - i - 1
                    speed = f"{figures.tokens_per_second:,.0f} tokens/s, loss {figures.losses[self.steps]:.4f}"
                    _log(f"{label}: {speed}" + (f"; about {human_time(left * mean)} left" if left else ""))
            except Stopped as stop:
                _log(f"stopped by {stop}; the same command makes the missing runs")
                return 128 + stop.number
        return exit_codes.DONE

    def _make(self, slot: Slot, label: str) -> report.RunFigures | None:
        """Make one run; its figures, or None if it failed."""
        folder = self.out / "runs" / slot.folder
        folder.mkdir(parents=True, exist_ok=True)
        console = folder / "console.log"
        _log(f"{label} starts; its output: {console}")
        config = self.out / "levels" / slot.planned.level.file
        arguments = [f"--job.config_file={config}", *self.common, *slot.planned.flags, f"--job.dump_folder={folder}"]
        environment = training_environment(self.machine.device_type)
        code = run(training_command(self.ranks, arguments), console, environment)
        done = self._done(slot)
        figures = None if done is None else report.measure(done, slot.name, slot.repeat, self.warmup)
        if code or done is None or figures is None:
            why = f"failed with exit code {code}" if code else f"left no metrics of {self.steps} steps in {folder}"
            _log(f"{label} {why}. Its last lines:")
            print(escape("\n".join(f"    {line}" for line in last_lines(console))), file=sys.stderr, flush=True)
            _log(f"the whole output: {console}; the same command tries again, --skip {slot.name} leaves it out")
            return None
        self.finished[slot.folder] = done
        return figures

    def _figures(self) -> tuple[list[report.RunFigures], list[report.LevelFigures], list[str]]:
        """Figures of each run and of each level, and notes on them."""
        names = [one.level.name for one in self.planned]
        slots = [slot for slot in in_turn(self.planned, self.repeats) if slot.folder in self.finished]
        measured = [report.measure(self.finished[s.folder], s.name, s.repeat, self.warmup) for s in slots]
        runs = [one for one in measured if one is not None]
        base = self.planned[0]
        unlike = {
            one.level.name: found for one in self.planned[1:] if (found := task_differences(base.plans, one.plans))
        }
        levels = report.summarize(names, runs, unlike)
        notes = [
            f"{name} differs from {names[0]} in {', '.join(found)}: losses not compared"
            for name, found in unlike.items()
        ]
        if emulated := [one.level.name for one in self.planned if one.plans.float8.enable and one.plans.float8.emulate]:
            notes.insert(0, f"float8 is emulated in {', '.join(emulated)}: compare their losses, not their speed")
        if self.machine.device_type == "cpu":
            notes.append("memory on a CPU is the resident memory of rank 0's process, libraries included")
        if levels[0].loss_spread is not None:
            notes.append(f"between repeats of {names[0]} losses differ by at most {levels[0].loss_spread:.2g}")
        return runs, levels, notes

    def _head(self) -> list[str]:
        versions = provenance.versions()
        return [
            f"{self.ranks} x {self.machine.device}, {os.cpu_count()} processor cores; "
            + ", ".join(f"{name} {versions[name]}" for name in ("titanlite", "torch", "python")),
            f"{self.steps} steps a run, the first {self.warmup} not counted; medians of {self.repeats} repeats in turn",
        ]

    def _save(self) -> str:
        """Write the results as JSON and return them. Raises OSError."""
        runs, levels, notes = self._figures()
        content = {
            "format": 2,
            "title": self.title,
            "command": list(provenance.command(["titanlite", *sys.argv[1:]])),
            "hardware": self._hardware(),
            "versions": provenance.versions(),
            "steps": self.steps,
            "warmup": self.warmup,
            "repeats": self.repeats,
            "levels": [asdict(level) for level in levels],
            "runs": [asdict(one) for one in runs],
            "notes": notes,
            "config": {one.level.name: one.values for one in self.planned},
        }
        text = json.dumps(_plain(content), indent=1, allow_nan=False) + "\n"
        aside = self.out / f".{_RESULTS}.{os.getpid()}.tmp"
        aside.write_text(text, encoding="utf-8")
        os.replace(aside, self.out / _RESULTS)
        return text

    def finish(self, as_json: bool) -> str:
        """Write the page, the results and the pictures; return the text for standard output. Raises OSError."""
        results = self._save()
        runs, levels, notes = self._figures()
        pictures = []
        if runs:
            first: dict[str, Run] = {}
            for one in runs:
                first.setdefault(one.level, self.finished[f"{one.level}-{one.repeat}"])
            ordered = {level.level: first[level.level] for level in levels if level.level in first}
            try:
                report.draw(levels, runs, ordered, self.out / _LOSSES, self.out / _SPEEDS)
                pictures = [_LOSSES, _SPEEDS]
            except PlotsMissing as error:
                print(f"{_LOSSES} and {_SPEEDS} are not drawn: {error}", file=sys.stderr)
        table = report.table(levels, self.steps, self.repeats)
        parts = [
            f"# Benchmark: {self.title}",
            "\n".join(f"- {line}" for line in [*self._head(), f"`{' '.join(json.loads(results)['command'])}`"]),
            report.markdown_table(table),
            "\n".join(f"- {one.level.name}: {one.level.about}" for one in self.planned),
            "\n".join(f"- {note}" for note in notes),
            "\n".join(f"![{Path(name).stem}]({name})" for name in pictures),
        ]
        (self.out / _PAGE).write_text("\n\n".join(filter(None, parts)) + "\n", encoding="utf-8")
        written = ", ".join(str(self.out / name) for name in (_PAGE, _RESULTS, *pictures))
        if as_json:
            return results.removesuffix("\n")
        lines = [*self._head(), "", render(table, sys.stdout.isatty()), "", *(f"note: {note}" for note in notes)]
        return "\n".join(["", *lines, "", f"written: {written}"])


def _plain(value: Any) -> Any:
    """As JSON; numbers that are not finite become strings, as in metrics.jsonl."""
    if isinstance(value, Mapping):
        return {str(name): _plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return json_value(value)


def _log(text: str) -> None:
    """Write a line of progress to standard error: standard output holds the table."""
    print(f"{datetime.now():%H:%M:%S} {escape(text)}", file=sys.stderr, flush=True)
