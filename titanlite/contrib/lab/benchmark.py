"""`titanlite benchmark`: speed, memory and losses of one config at several optimisation levels."""

from __future__ import annotations

import argparse
import contextlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from titanlite import exit_codes
from titanlite.cli import at_least
from titanlite.cli.parser import Commands, new_command
from titanlite.cli.run_figures import to_json
from titanlite.config.errors import ConfigError, bad_flag, refuse
from titanlite.config.load import read
from titanlite.config.toml import quote
from titanlite.contrib.lab import refuse_keys
from titanlite.contrib.lab.benchmark_figures import (
    measure,
    summarize,
    table,
)
from titanlite.contrib.lab.members import Member, check_members, run_members
from titanlite.contrib.processes import tell
from titanlite.resolve.load import resolve
from titanlite.runs.read import Run, read_run
from titanlite.utils import atomic_write, render

RESULTS = "benchmark.json"


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
    "--checkpoint.start=resume-or-fresh",
    "--checkpoint.create_seed_checkpoint=false",
    "--checkpoint.enable_checkpoint=false",
    "--checkpoint.folder=checkpoint",
    "--checkpoint.hub=",
    "--checkpoint.initial_load_path=none",
    "--validation.enable=false",
    "--profiling.enable_profiling=false",
    "--profiling.enable_memory_snapshot=false",
    "--metrics.enable_tensorboard=false",
    "--metrics.enable_wandb=false",
    "--metrics.trackers=[]",
    "--eval.tasks=[]",
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
        "the same text:\n\n" + "\n".join(levels) + "\n\nPrints speed, memory and losses of "
        "each level, and its speed over the first level's.",
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


def _run(arguments: argparse.Namespace) -> tuple[str, int]:
    from titanlite.cli.train import count_gpus

    refuse_keys(arguments.flags, OWN)
    levels = levels_of(arguments.config, arguments.overlay, arguments.skip)
    gpus = count_gpus()
    ranks = arguments.ranks or gpus or 2
    default = levels_of(arguments.config, [], [])["default"]
    common = common_flags(default, arguments.flags, arguments.steps, ranks)
    if not gpus:
        common.append("--float8.emulate=true")
    out = arguments.out or Path("outputs", "benchmark", Path(arguments.config).stem)
    repeats = range(1, arguments.repeats + 1)
    members = {
        (name, repeat): Member(f"{name}-{repeat}", [*words, *common])
        for repeat in repeats
        for name, words in levels.items()
    }
    first = [members[name, 1] for name in levels]
    for run in check_members(first, [], out / "runs", ranks):
        if arguments.steps < arguments.warmup + run.metrics.log_freq:
            message = f"too few: --warmup {arguments.warmup} and metrics.log_freq come before"
            raise bad_flag(f"--steps {arguments.steps}", message)
    finished = _make_runs(members, out / "runs", ranks, len(levels))
    if not finished:
        return "no run is finished", exit_codes.ERROR
    text = _results(arguments, list(levels), finished, out)
    is_whole = len(finished) == len(members)
    return text, exit_codes.DONE if is_whole else exit_codes.ERROR


def levels_of(config: str, overlays: Sequence[str], skipped: Sequence[str]) -> dict[str, list[str]]:
    """Return files and flags by level: the four of a config without `skipped` ones, then each
    overlay NAME=FILE.toml over the first. Raises ConfigError.
    """
    found = {}
    on: list[str] = []
    for name, (_, adds) in LEVELS.items():
        on += adds
        switches = [f"--{key}={quote(key in on)}" for key in SWITCHES]
        found[name] = ["--job.config_file", config, *switches]
    for text in overlays:
        name, _, file = text.partition("=")
        if name in found or not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*=.+", text):
            message = f"expected NAME=FILE.toml, and a plain name other than {', '.join(found)}"
            raise bad_flag(f"--overlay {text}", message)
        given, problems = read([f"--job.config_file={file}"])
        refuse(problems)
        off = [f"--{key}=false" for key in SWITCHES if not given.is_given(key)]
        found[name] = ["--job.config_file", config, file, *off]
    for name in skipped:
        if name not in found:
            raise bad_flag(f"--skip {name}", f"unknown level; the levels are {', '.join(found)}")
    return {name: words for name, words in found.items() if name not in skipped}


def common_flags(default: Sequence[str], flags: Sequence[str], steps: int, ranks: int) -> list[str]:
    """Return the flags of all runs: their length, one seed, the config's own rates for these steps,
    and those of the user.
    """
    base, problems = read([*default, *flags])
    refuse(problems)
    found = [
        f"--training.steps={steps}",
        *_COMMON,
        f"--training.seed={base.value('training.seed')}",
    ]
    # It needs checkpoints.
    if base.value("guard.policy") == "rollback":
        found.append("--guard.policy=stop")
    with contextlib.suppress(ConfigError):  # It is reported with the levels.
        # The schedule keeps its length: the runs are its first steps, not a short copy of it.
        found.append(f"--lr_scheduler.total_steps={resolve(base, ranks)[1].schedule.total_steps}")
    return [*found, *flags]


def _make_runs(
    members: Mapping[tuple[str, int], Member], folder: Path, ranks: int, levels: int
) -> dict[tuple[str, int], Run]:
    """Make the missing runs, each repeat from another level; return all that are done. A run that
    fails is the last one.
    """
    finished = {}
    keys = list(members)
    for number in range(len(keys)):
        repeat, place = divmod(number, levels)
        key = keys[repeat * levels + (repeat + place) % levels]
        member = members[key]
        label = f"run {number + 1} of {len(keys)}: {key[0]}, repeat {key[1]}"
        (result,) = run_members([member], [], folder, ranks)
        if result.state != "done":
            tell(f"{label} failed with {result.reason or result.state}; --skip leaves a level out")
            break
        finished[key] = read_run(folder / member.name)
        tell(f"{label} is done")
    return finished


def _results(
    arguments: argparse.Namespace,
    levels: Sequence[str],
    finished: Mapping[tuple[str, int], Run],
    out: Path,
) -> str:
    runs = [measure(run, *key, arguments.warmup) for key, run in finished.items()]
    rows = summarize(levels, runs)
    config = {key[0]: run.config for key, run in finished.items()}
    results = {
        "steps": arguments.steps,
        "config": config,
        "levels": [asdict(row) for row in rows],
        "runs": [asdict(run) for run in runs],
    }
    atomic_write(out / RESULTS, to_json(results) + "\n")
    lines = [render(table(rows, arguments.steps, arguments.repeats)), ""]
    if rows[0].loss_spread is not None:
        spread = f"{rows[0].loss_spread:.2g}"
        lines.append(f"note: between repeats of {levels[0]} losses differ by at most {spread}")
    return "\n".join([*lines, f"written: {out / RESULTS}"])
