"""The levels of a benchmark: their TOML files, and all checks before the first run."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from titanlite.config.entries import command_line_entries
from titanlite.config.errors import ConfigError, Problem
from titanlite.config.load import read
from titanlite.config.names import ALIASES
from titanlite.config.plans import Plans
from titanlite.config.schema import quote
from titanlite.prepare import checked_plans, resolve_plans
from titanlite.runs.provenance import config_values
from titanlite.runs.read import RunError
from titanlite.tools.benchmark_report import after_warmup
from titanlite.tools.processes import training_environment


class BenchmarkError(RunError):
    """A benchmark cannot start or continue; the text gives the reason and the remedy."""


@dataclass(frozen=True)
class Level:
    """A row of the table."""

    name: str
    about: str
    #: Keys that this level switches on beside those of the level before.
    adds: tuple[str, ...] = ()
    #: Its TOML file, which extends the level before.
    text: str = ""

    @property
    def file(self) -> str:
        return f"{self.name}.toml"


LEVELS = (
    Level("default", "the config with all of these off"),
    Level("compile", "torch.compile of each block and the loss", ("training.compile",)),
    Level("float8", "products of linear layers in float8", ("float8.enable_float8_linear",)),
    Level(
        "float8-all-gather",
        "weights gathered in float8, their scales computed ahead",
        ("float8.enable_fsdp_float8_all_gather", "float8.precompute_float8_dynamic_scale_for_fsdp"),
    ),
)
SWITCHES = tuple(key for level in LEVELS for key in level.adds)
#: Off in every run: extra time, or files elsewhere.
_OFF = (
    *("checkpoint.enable_checkpoint", "validation.enable", "profiling.enable_profiling"),
    *("profiling.enable_memory_snapshot", "metrics.enable_tensorboard", "metrics.enable_wandb"),
)
#: Keys that the command sets itself -> the hint for a flag of that name.
_OWN = {
    "job.config_file": "name the config first, without a flag",
    "job.dump_folder": "every run has its own folder; --out names the folder above them",
    **dict.fromkeys(("training.steps", "training.tokens", "training.epochs"), "use --steps, the length of each run"),
    "checkpoint.enable_checkpoint": "the runs are short and save no checkpoints",
    **dict.fromkeys(SWITCHES, "the levels differ in this key: use --skip and --overlay"),
}
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


def refuse_own_keys(flags: Sequence[str]) -> None:
    entries, _ = command_line_entries(flags)
    keys = {entry.name: ALIASES[entry.name].canonical if entry.name in ALIASES else entry.name for entry in entries}
    found = [(name, _OWN[key]) for name, key in keys.items() if key in _OWN]
    if found:
        raise ConfigError([Problem("command line", name, "cannot be set here", hint) for name, hint in found])


def make_levels(config: Path, overlays: Sequence[str]) -> list[Level]:
    """The four levels of a config, then each overlay NAME=FILE.toml over the first level. Raises BenchmarkError."""
    levels: list[Level] = []
    for level in LEVELS:
        below = levels[-1].file if levels else str(config.resolve())
        text = _toml(level.name, [below], dict.fromkeys(level.adds or SWITCHES, bool(level.adds)))
        levels.append(Level(level.name, level.about, level.adds, text))
    for words in overlays:
        name, _, file = words.partition("=")
        if not file or not _NAME.fullmatch(name):
            raise BenchmarkError(
                f"--overlay {words}: expected NAME=FILE.toml, the name of letters, digits, dots, dashes and underscores"
            )
        if not Path(file).is_file():
            raise BenchmarkError(f"--overlay {words}: there is no file {file}")
        if name in [level.name for level in levels]:
            raise BenchmarkError(f"--overlay {words}: there is a level {name} already; take another name")
        text = _toml(name, [levels[0].file, str(Path(file).resolve())], {})
        levels.append(Level(name, f"{file} over {levels[0].name}", text=text))
    return levels


def _toml(name: str, extends: Sequence[str], values: Mapping[str, bool]) -> str:
    lines = [f'# Level "{name}", written by `titanlite benchmark`.', f"job.extends = {quote(list(extends))}"]
    return "\n".join([*lines, *(f"{key} = {quote(value)}" for key, value in values.items())]) + "\n"


def write_levels(levels: Sequence[Level], folder: Path) -> None:
    """Write the file of each level. Raises OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    for level in levels:
        (folder / level.file).write_text(level.text, encoding="utf-8")


@dataclass(frozen=True)
class Machine:
    """The hardware of the runs."""

    #: "cpu" or "cuda".
    device_type: str
    #: Name of the device.
    device: str
    #: GPUs that torch finds.
    gpus: int
    #: Why the GPUs cannot do float8 products, and a remedy; None if they can, and on a CPU.
    no_float8: tuple[str, str] | None = None


_PROBE = """
import json, torch
from titanlite.config.errors import ConfigError
from titanlite.config.plans import Float8Plan
from titanlite.metrics.throughput import device_name
gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
lacking = None
if gpus:
    from titanlite.parallel.float8 import check_float8
    try:
        check_float8(Float8Plan(enable=True))
    except ConfigError as error:
        lacking = error.problems[0].message, error.problems[0].hint
print(json.dumps([device_name(torch.device("cuda", 0) if gpus else torch.device("cpu")), gpus, lacking]))
"""


def probe() -> Machine:
    """Describe this machine, in a child process: a process that has used a GPU keeps some of its memory.

    Raises BenchmarkError.
    """
    done = subprocess.run(
        [sys.executable, "-c", _PROBE], capture_output=True, text=True, env=training_environment("cuda")
    )
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no output"])[-1]
        raise BenchmarkError(f"torch cannot list the devices of this machine: {last}")
    name, gpus, lacking = json.loads(done.stdout.strip().splitlines()[-1])
    return Machine("cuda" if gpus else "cpu", name, gpus, tuple(lacking) if lacking else None)


def common_flags(config: str, flags: Sequence[str], steps: int, ranks: int) -> list[str]:
    """Flags of all runs: their length, one seed, and the config's own learning rates for these steps."""
    found = [f"--training.steps={steps}", "--metrics.log_freq=1", "--float8.drift_check=0"]
    found += [f"--{key}=false" for key in _OFF]
    base, _ = read([f"--job.config_file={config}", *flags])
    if base.value("checkpoint.start") == "resume":
        found.append("--checkpoint.start=resume-or-fresh")
    found.append(f"--training.seed={base.value('training.seed') or 0}")
    try:
        # The schedule keeps its length: the runs are its first steps, not a short copy of it.
        length = resolve_plans(base, ranks).schedule.total_steps
    except ConfigError:
        length = None  # reported with the levels
    return [*found, *([] if length is None else [f"--lr_scheduler.total_steps={length}"]), *flags]


@dataclass(frozen=True)
class Planned:
    """A level that passed all checks."""

    level: Level
    plans: Plans
    #: Further flags for `train.py`.
    flags: tuple[str, ...]
    #: The resolved config by `section.key`, without the output folder.
    values: Mapping[str, Any]


def check_levels(
    levels: Sequence[Level], folder: Path, common: Sequence[str], ranks: int, machine: Machine
) -> list[Planned]:
    """Check all levels as they will run.

    Raises ConfigError for what is wrong with the config itself, BenchmarkError with every problem of the other levels.
    """
    planned = [_check(levels[0], folder, common, ranks, machine)]
    refused: dict[str, Sequence[Problem]] = {}
    for level in levels[1:]:
        try:
            planned.append(_check(level, folder, common, ranks, machine))
        except ConfigError as error:
            refused[level.name] = error.problems
    if refused:
        lines = [f"{len(refused)} of {len(levels)} levels cannot run; nothing was started"]
        for name, problems in refused.items():
            lines += [f"  level {name}:", *("    " + str(one).replace("\n", "\n    ") for one in problems)]
        lines.append(f"to run the others: {' '.join(f'--skip {name}' for name in refused)}")
        raise BenchmarkError("\n".join(lines))
    return planned


def _check(level: Level, folder: Path, common: Sequence[str], ranks: int, machine: Machine) -> Planned:
    arguments = [f"--job.config_file={folder / level.file}", *common]
    flags: tuple[str, ...] = ()
    if machine.device_type == "cpu" and read(arguments)[0].value("float8.enable_float8_linear"):
        flags = ("--float8.emulate=true",)
    _, plans = checked_plans([*arguments, *flags], ranks, training=True)
    if plans.compile.model or plans.compile.loss:
        from titanlite.parallel.compile import prepare_compile  # needs torch

        prepare_compile(plans.compile, machine.device_type)
    if plans.float8.enable and not plans.float8.emulate and machine.no_float8:
        raise ConfigError([Problem("", "float8.enable_float8_linear", *machine.no_float8)])
    return Planned(level, plans, flags, without_folder(config_values(plans.config_toml)))


def without_folder(values: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in values.items() if key != "job.dump_folder"}


def check_logged_steps(planned: Sequence[Planned], steps: int, warmup: int) -> None:
    for one in planned:
        freq = one.plans.observe.log_freq
        logged = [{"step": float(step)} for step in sorted({1, steps, *range(freq, steps + 1, freq)})]
        if not after_warmup(logged, warmup):
            raise BenchmarkError(
                f"metrics.log_freq = {freq} logs no steps between step {warmup} (--warmup) and step {steps} (--steps): "
                "use a lower value"
            )


def task_differences(base: Plans, other: Plans) -> list[str]:
    """Differences of two levels that make their losses incomparable: weights, text, or the batch."""
    sides = [
        {
            "model": plans.model,
            "tokenizer": plans.tokenizer,
            "text": (plans.data.dataset, plans.data.path),
            "order of the text": (plans.data.seed, plans.data.shuffle),
            "training.seed": plans.train.seed,
            "sequence length": plans.batch.seq_len,
            "sequences per step": plans.batch.global_batch_size,
        }
        for plans in (base, other)
    ]
    return [name for name, value in sides[0].items() if sides[1][name] != value]
