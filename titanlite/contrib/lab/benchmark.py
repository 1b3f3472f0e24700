"""`titanlite benchmark`: speed, memory and losses of one config at several optimisation levels."""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from titanlite import exit_codes
from titanlite.cli import at_least, refuse_keys
from titanlite.cli.parser import Commands, new_command
from titanlite.cli.pictures import draw
from titanlite.cli.processes import Stopped, tell
from titanlite.cli.run_figures import charts, to_json
from titanlite.config.errors import ConfigError, bad_flag, refuse
from titanlite.config.load import read
from titanlite.config.toml import quote
from titanlite.contrib.lab.benchmark_figures import (
    LevelFigures,
    after_warmup,
    measure,
    summarize,
    table,
)
from titanlite.contrib.lab.members import Member, MemberError, check_members, run_members
from titanlite.resolve.load import resolve
from titanlite.run.config import RunConfig
from titanlite.runs import provenance
from titanlite.runs.read import Run, read_run
from titanlite.utils import atomic_write, render

RESULTS = "benchmark.json"
PAGE = "benchmark.md"
PICTURE = "benchmark.svg"


@dataclass(frozen=True)
class Level:
    """A row of the table. files: of its config. switches: their keys, on or off."""

    name: str
    about: str
    files: Sequence[str]
    switches: Mapping[str, bool]

    @property
    def arguments(self) -> list[str]:
        """Its files and flags for `titanlite train`."""
        flags = [f"--{key}={quote(is_on)}" for key, is_on in self.switches.items()]
        return ["--job.config_file", *self.files, *flags]


#: Name of a level → what it adds, and the keys that it switches on beside those before it.
LEVELS = {
    "default": ("the config with all of these off", ()),
    "compile": ("torch.compile of each block and the loss", ("training.compile",)),
    "float8": ("products of linear layers in float8", ("float8.enable_float8_linear",)),
    "float8-all-gather": (
        "weights gathered in float8, their scales computed ahead",
        ("float8.enable_fsdp_float8_all_gather", "float8.precompute_float8_dynamic_scale_for_fsdp"),
    ),
}
SWITCHES = tuple(key for _, adds in LEVELS.values() for key in adds)
#: Flags of every run: they save time, and keep all files in the folder of the run.
_COMMON = (
    "--metrics.log_freq=1",
    "--float8.drift_check=0",
    "--checkpoint.enable_checkpoint=false",
    "--checkpoint.folder=checkpoint",
    "--checkpoint.hub=",
    "--checkpoint.keep_best=0",
    "--validation.enable=false",
    "--profiling.enable_profiling=false",
    "--profiling.enable_memory_snapshot=false",
    "--metrics.enable_tensorboard=false",
    "--metrics.enable_wandb=false",
    "--metrics.trackers=[]",
    "--sample.prompts=[]",
    "--eval.tasks=[]",
)
#: A run that begins with weights of others needs checkpoints. It saves once, as little as can be.
_LOADS = (
    "--checkpoint.enable_checkpoint=true",
    "--checkpoint.start=from",
    "--checkpoint.load_step=-1",
    "--checkpoint.initial_load_model_only=true",
    "--checkpoint.interval_type=steps",
    "--checkpoint.milestones=[]",
    "--checkpoint.enable_first_step_checkpoint=false",
    "--checkpoint.async_mode=disabled",
    "--checkpoint.verify_saves=false",
    "--checkpoint.model_weights_only=true",
    "--checkpoint.export_dtype=bfloat16",
    "--checkpoint.export_ema=false",
    "--checkpoint.last_save_in_hf=false",
)
#: Values that need what is off → what stands for them.
_WITHOUT = {
    ("checkpoint.start", "resume"): "resume-or-fresh",
    ("checkpoint.create_seed_checkpoint", True): "false",
    ("guard.policy", "rollback"): "stop",
}
#: Must be equal for losses to be comparable, beside all of [model].
_TASK = (
    "training.dataset",
    "training.dataset_path",
    "training.seed",
    "training.seq_len",
    "data.seed",
    "data.shuffle",
    "data.source",
    "data.skip_steps",
)
#: Keys that the command sets itself → the hint for a flag of that name.
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

_EPILOG = """\
examples:
  titanlite benchmark debug_model.toml --steps 20 --warmup 5
  titanlite benchmark llama3_8b.toml --ranks 8 --repeats 5 --training.seq_len 4096
  titanlite benchmark llama3_8b.toml --overlay no-ac=no_ac.toml --skip float8

Further --section.key VALUE flags apply to every level, as for train.py. Finished runs in FOLDER
are kept: after a failure or Ctrl-C the same command makes the missing runs.
Without a GPU float8 is emulated: its losses are meaningful, its speed is not.

Exit status: 0 if all runs finished, 1 if one failed, 2 if the config or the command line is wrong,
130 after Ctrl-C."""


def add_command(commands: Commands) -> None:
    """Add the command to argparse."""
    width = max(map(len, LEVELS))
    levels = []
    for name, (about, adds) in LEVELS.items():
        levels.append(f"  {name:<{width}}  {'+ ' if adds else ''}{about}")
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
    from titanlite.cli.train import count_gpus

    refuse_keys(arguments.flags, OWN)
    levels = levels_of(arguments.config, arguments.overlay, arguments.skip)
    gpus = count_gpus()
    ranks = arguments.ranks or gpus or 2
    default = levels_of(arguments.config, [], [])[0]
    common = common_flags(default, arguments.flags, arguments.steps, ranks)
    if not gpus:
        common.append("--float8.emulate=true")
    folder = (arguments.out or Path("outputs", "benchmark", Path(arguments.config).stem)) / "runs"
    members = [Member(f"{level.name}-1", [*level.arguments, *common]) for level in levels]
    configs = check_members(members, [], folder, ranks)
    for run in configs:
        must_count_steps(run, arguments.steps, arguments.warmup)
    finished: dict[tuple[str, int], Run] = {}
    code = exit_codes.ERROR
    try:
        if _make_runs(arguments, levels, common, ranks, folder, finished):
            code = exit_codes.DONE
    except Stopped as stop:
        code = exit_codes.after_signal(stop.number)
    except OSError as error:
        raise MemberError(f"cannot write to {folder}: {error.strerror or error}") from None
    sizes = {
        level.name: run.batch.global_batch_size for level, run in zip(levels, configs, strict=True)
    }
    return _finish(arguments, levels, finished, sizes), code


def levels_of(config: str, overlays: Sequence[str], skipped: Sequence[str]) -> list[Level]:
    """Return the four levels of a config, then each overlay NAME=FILE.toml over the first.

    skipped: names of levels that are left out. Raises ConfigError.
    """
    found: dict[str, Level] = {}
    on: list[str] = []
    for name, (about, adds) in LEVELS.items():
        on += adds
        found[name] = Level(name, about, [config], {key: key in on for key in SWITCHES})
    for text in overlays:
        name, _, file = text.partition("=")
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", name) or not Path(file).is_file():
            message = "expected NAME=FILE.toml, a plain name and a file that exists"
            raise bad_flag(f"--overlay {text}", message)
        if name in found:
            raise bad_flag(f"--overlay {text}", f"there is a level {name} already")
        given, problems = read([f"--job.config_file={file}"])
        refuse(problems)
        off = {key: False for key in SWITCHES if not given.is_given(key)}
        found[name] = Level(name, f"{file} over default", [config, file], off)
    for name in skipped:
        if name not in found:
            raise bad_flag(f"--skip {name}", f"unknown level; the levels are {', '.join(found)}")
    chosen = [level for name, level in found.items() if name not in skipped]
    if not chosen:
        raise bad_flag("--skip", "leaves no level")
    return chosen


def common_flags(default: Level, flags: Sequence[str], steps: int, ranks: int) -> list[str]:
    """Return the flags of all runs: their length, one seed, the weights that they begin with, and
    the config's own learning rates for these steps. flags: of the user.
    """
    base, problems = read([*default.arguments, *flags])
    refuse(problems)
    found = [
        f"--training.steps={steps}",
        *_COMMON,
        f"--training.seed={base.value('training.seed')}",
    ]
    for (key, value), other in _WITHOUT.items():
        if base.value(key) == value:
            found.append(f"--{key}={other}")
    with contextlib.suppress(ConfigError):  # It is reported with the levels.
        # The schedule keeps its length: the runs are its first steps, not a short copy of it.
        found.append(f"--lr_scheduler.total_steps={resolve(base, ranks)[1].schedule.total_steps}")
    found += flags
    if base.value("checkpoint.initial_load_path"):
        found += [*_LOADS, f"--checkpoint.interval={steps}"]
    return found


def must_count_steps(run: RunConfig, steps: int, warmup: int) -> None:
    """Raise ConfigError if a run logs no step after the warm-up."""
    freq = run.metrics.log_freq
    logged = sorted({1, steps, *range(freq, steps + 1, freq)})
    if steps <= warmup or not after_warmup([{"step": float(step)} for step in logged], warmup):
        message = f"no step after --warmup {warmup} is logged with metrics.log_freq = {freq}"
        raise bad_flag(f"--steps {steps}", message)


def _make_runs(
    arguments: argparse.Namespace,
    levels: Sequence[Level],
    common: Sequence[str],
    ranks: int,
    folder: Path,
    finished: dict[tuple[str, int], Run],
) -> bool:
    """Make the missing runs, and add all that are done to `finished`; return whether all are.

    Each repeat starts with another level. A run that fails is the last one.
    """
    count = len(levels)
    for number in range(count * arguments.repeats):
        repeat, place = divmod(number, count)
        level = levels[(repeat + place) % count]
        label = (
            f"run {number + 1} of {count * arguments.repeats}: {level.name}, repeat {repeat + 1}"
        )
        member = Member(f"{level.name}-{repeat + 1}", [*level.arguments, *common])
        own = folder / member.name
        # A run that was stopped must not resume, and one that is done needs no weights.
        shutil.rmtree(own / "checkpoint", ignore_errors=True)
        (result,) = run_members([member], [], folder, ranks)
        shutil.rmtree(own / "checkpoint", ignore_errors=True)
        if result.state != "done":
            why = result.reason or result.state
            tell(
                f"{label} failed with {why}; the same command tries again, --skip {level.name} "
                "leaves it out"
            )
            return False
        run = read_run(own)
        first = next(iter(finished.values()), run)
        if _conditions(run) != _conditions(first):
            raise MemberError(
                f"{own} and {first.folder} were made by {_conditions(run)} and "
                f"{_conditions(first)}: name another folder with --out"
            )
        finished[level.name, repeat + 1] = run
        figures = measure(run, level.name, repeat + 1, arguments.warmup)
        loss = figures.losses[arguments.steps]
        tell(f"{label}: {figures.tokens_per_second:,.0f} tokens/s, loss {loss:.4f}")
    return True


def _conditions(run: Run) -> str:
    """Return what must not change between the runs of a benchmark."""
    record = run.attempts[-1]
    versions = record.get("versions", {})
    return (
        f"{record.get('ranks')} x {record.get('device')}, titanlite {versions.get('titanlite')}, "
        f"torch {versions.get('torch')}, python {versions.get('python')}"
    )


def _finish(
    arguments: argparse.Namespace,
    levels: Sequence[Level],
    finished: Mapping[tuple[str, int], Run],
    sizes: Mapping[str, int],
) -> str:
    """Write the results, the page and the picture; return the text for standard output.

    sizes: sequences of a step, by level.
    """
    if not finished:
        return "no run is finished"
    first = next(iter(finished.values()))
    config = {name: _values(run) for (name, _), run in finished.items()}
    unlike = _unlike(levels[0].name, config, sizes)
    runs = [
        measure(run, name, repeat, arguments.warmup) for (name, repeat), run in finished.items()
    ]
    rows = summarize([level.name for level in levels], runs, unlike)
    record = first.attempts[-1]
    notes = _notes(config, unlike, rows[0], str(record.get("device")))
    title = Path(arguments.config).name
    command = provenance.command(["titanlite", *sys.argv[1:]])
    hardware = {"device": record.get("device"), "world_size": record.get("ranks")}
    results: dict[str, Any] = {
        "format": 2,
        "title": title,
        "command": command,
        "notes": notes,
        "config": config,
    }
    results |= {"versions": provenance.versions()}
    results |= {"hardware": {**hardware, "cores": os.cpu_count()}}
    results |= {name: getattr(arguments, name) for name in ("steps", "warmup", "repeats")}
    results |= {"levels": [asdict(row) for row in rows], "runs": [asdict(run) for run in runs]}
    head = (
        f"{_conditions(first)}; {os.cpu_count()} processor cores\n"
        f"{arguments.steps} steps a run, the first {arguments.warmup} not counted; medians of "
        f"{arguments.repeats} repeats in turn\n"
    )
    shown = table(rows, arguments.steps, arguments.repeats)
    below = "\n".join(f"note: {note}" for note in notes)
    text = f"{head}\n{render(shown, False)}\n\n{below}".rstrip()
    about = "\n".join(f"- {level.name}: {level.about}" for level in levels)
    picture = f"![curves of loss and speed]({PICTURE})\n"
    page = [f"# Benchmark: {title}", f"`{' '.join(command)}`", f"```\n{text}\n```", about, picture]
    compared = {name: run for (name, repeat), run in finished.items() if repeat == 1}
    curves = charts(list(compared.values()), list(compared))[:2]
    files = {
        PAGE: "\n\n".join(page),
        RESULTS: f"{to_json(results)}\n",
        PICTURE: draw(curves, f"{title}: the first run of each level"),
    }
    out = first.folder.parents[1]
    for name, content in files.items():
        atomic_write(out / name, content)
    if arguments.json:
        return to_json(results)
    written = ", ".join(str(out / name) for name in files)
    return f"\n{head}\n{render(shown)}\n\n{below}\n\nwritten: {written}"


def _values(run: Run) -> dict[str, Any]:
    """Return the config of a run, without its place."""
    return {key: value for key, value in (run.config or {}).items() if key != "job.dump_folder"}


def _unlike(
    base: str, config: Mapping[str, Mapping[str, Any]], sizes: Mapping[str, int]
) -> dict[str, list[str]]:
    """Return each level with other weights, text or batch than the first → the keys."""
    found = {}
    for name in config if base in config else ():
        keys = []
        for key, value in config[name].items():
            is_task = key.startswith("model.") or key in _TASK
            if is_task and config[base].get(key) != value:
                keys.append(key)
        if sizes[name] != sizes[base]:
            keys.append("sequences per step")
        if keys:
            found[name] = keys
    return found


def _notes(
    config: Mapping[str, Mapping[str, Any]],
    unlike: Mapping[str, Sequence[str]],
    base: LevelFigures,
    device: str,
) -> list[str]:
    """Return what a reader of the table must know. base: the first level."""
    notes = [
        f"{name} differs from {base.level} in {', '.join(keys)}: losses not compared"
        for name, keys in unlike.items()
    ]
    emulated = [name for name, v in config.items() if v[SWITCHES[1]] and v["float8.emulate"]]
    if emulated:
        notes.append(
            f"float8 is emulated in {', '.join(emulated)}: compare their losses, not their speed"
        )
    if device.startswith("CPU"):
        notes.append("memory on a CPU is the resident memory of rank 0, libraries included")
    if base.loss_spread is not None:
        spread = f"{base.loss_spread:.2g}"
        notes.append(f"between repeats of {base.level} losses differ by at most {spread}")
    return notes
