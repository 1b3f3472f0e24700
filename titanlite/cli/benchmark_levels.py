"""The levels of a benchmark: their configs, written as TOML and checked before the first run."""

from __future__ import annotations

import contextlib
import multiprocessing
import re
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from titanlite.cli.benchmark_report import after_warmup
from titanlite.config.errors import ConfigError, Problem, refuse
from titanlite.config.load import read
from titanlite.config.toml import quote
from titanlite.resolve.load import check_config, resolve
from titanlite.runs.provenance import config_values
from titanlite.runs.read import RunError
from titanlite.utils import atomic_write


class BenchmarkError(RunError):
    """A benchmark cannot start or continue; the text gives the reason and the remedy."""


@dataclass(frozen=True)
class Level:
    """A row of the table. The fields after `text` are set by `check_levels`."""

    name: str
    about: str
    #: Keys that this level switches on beside those of the level before.
    adds: tuple[str, ...] = ()
    #: Its TOML file, which extends the level before.
    text: str = ""
    #: Further flags for `train.py`.
    flags: tuple[str, ...] = ()
    #: The resolved config by `section.key`, without the output folder.
    values: Mapping[str, Any] = field(default_factory=dict)
    #: The values that must be equal for losses to be comparable: weights, text and batch.
    task: Mapping[str, Any] = field(default_factory=dict)


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
    "checkpoint.enable_checkpoint",
    "validation.enable",
    "profiling.enable_profiling",
    "profiling.enable_memory_snapshot",
    "metrics.enable_tensorboard",
    "metrics.enable_wandb",
)
#: Folder of a run that begins with weights of others, for the save at its end.
SAVES = "checkpoint"
#: Such a run needs checkpoints. It takes weights alone, and saves once, as little as can be.
_LOADS = (
    "--checkpoint.enable_checkpoint=true",
    f"--checkpoint.folder={SAVES}",
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
#: Values that need what is off -> what stands for them.
_WITHOUT = {
    ("checkpoint.start", "resume"): "resume-or-fresh",
    ("checkpoint.create_seed_checkpoint", True): "false",
    ("guard.policy", "rollback"): "stop",
}
#: Beside all of [model].
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


def without(levels: Sequence[Level], skipped: Sequence[str]) -> list[Level]:
    """Return the levels that are not skipped. Raises BenchmarkError."""
    names = [level.name for level in levels]
    for name in skipped:
        if name not in names:
            raise BenchmarkError(f"--skip {name}: unknown level; the levels are {', '.join(names)}")
    chosen = [level for level in levels if level.name not in skipped]
    if not chosen:
        raise BenchmarkError("--skip leaves no level")
    return chosen


def must_count_steps(levels: Sequence[Level], steps: int, warmup: int) -> None:
    """Raise BenchmarkError if a level logs no step after the warm-up."""
    for freq in {level.values["metrics.log_freq"] for level in levels}:
        logged = sorted({1, steps, *range(freq, steps + 1, freq)})
        rows = [{"step": float(step)} for step in logged]
        if not after_warmup(rows, warmup):
            raise BenchmarkError(
                f"metrics.log_freq = {freq}: no step after --warmup {warmup} is logged; lower it"
            )


def make_levels(config: Path, overlays: Sequence[str]) -> list[Level]:
    """Return the four levels of a config, then each overlay NAME=FILE.toml over the first.

    Raises BenchmarkError.
    """
    levels: list[Level] = []
    for level in LEVELS:
        below = f"{levels[-1].name}.toml" if levels else str(config.resolve())
        lines = [f"{key} = {quote(bool(level.adds))}" for key in level.adds or SWITCHES]
        levels.append(replace(level, text=_toml(level.name, [below], lines)))
    for words in overlays:
        name, _, file = words.partition("=")
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", name) or not Path(file).is_file():
            raise BenchmarkError(
                f"--overlay {words}: expected NAME=FILE.toml, a plain name and a file that exists"
            )
        if name in [level.name for level in levels]:
            raise BenchmarkError(
                f"--overlay {words}: there is a level {name} already; take another name"
            )
        text = _toml(name, [f"{levels[0].name}.toml", str(Path(file).resolve())])
        levels.append(Level(name, f"{file} over {levels[0].name}", text=text))
    return levels


def _toml(name: str, extends: Sequence[str], lines: Sequence[str] = ()) -> str:
    head = (
        f'# Level "{name}", written by `titanlite benchmark`.\njob.extends = {quote(list(extends))}'
    )
    return "\n".join([head, *lines, ""])


def write_levels(levels: Sequence[Level], folder: Path) -> None:
    """Write the file of each level. Raises OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    for level in levels:
        atomic_write(folder / f"{level.name}.toml", level.text)


class Machine(NamedTuple):
    """The hardware of the runs."""

    #: Name of the device.
    device: str
    #: GPUs that torch finds.
    gpus: int = 0
    #: Why the GPUs cannot do float8 products; empty if they can, and on a CPU.
    no_float8: Sequence[Problem] = ()


def probe() -> Machine:
    """Describe this machine, in a child process: a process that has used a GPU keeps some of its
    memory.
    """
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as child:
        return child.submit(_describe).result()


def _describe() -> Machine:
    import torch

    from titanlite.config.sections import Float8
    from titanlite.features.float8.checks import machine_problems
    from titanlite.metrics.throughput import device_name

    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    no_float8 = list(machine_problems(Float8(enable_float8_linear=True))) if gpus else []
    return Machine(device_name(torch.device("cuda" if gpus else "cpu")), gpus, no_float8)


def common_flags(config: str, flags: Sequence[str], steps: int, ranks: int) -> list[str]:
    """Return the flags of all runs: their length, one seed, the weights that they begin with, and
    the config's own learning rates for these steps.
    """
    found = [f"--training.steps={steps}", "--metrics.log_freq=1", "--float8.drift_check=0"]
    found += [f"--{key}=false" for key in _OFF]
    found += ["--sample.prompts=[]", "--eval.tasks=[]", "--metrics.trackers=[]"]
    base, _ = read([f"--job.config_file={config}", *flags])
    if base.value("checkpoint.keep_best"):
        found.append("--checkpoint.keep_best=0")
    for (key, value), other in _WITHOUT.items():
        if base.value(key) == value:
            found.append(f"--{key}={other}")
    found.append(f"--training.seed={base.value('training.seed')}")
    with contextlib.suppress(ConfigError):  # It is reported with the levels.
        # The schedule keeps its length: the runs are its first steps, not a short copy of it.
        found.append(f"--lr_scheduler.total_steps={resolve(base, ranks)[1].schedule.total_steps}")
    loads: list[str] = []
    if base.value("checkpoint.initial_load_path"):
        loads = [*_LOADS, f"--checkpoint.interval={steps}"]
    return [*found, *flags, *loads]


def check_levels(
    levels: Sequence[Level], folder: Path, common: Sequence[str], ranks: int, machine: Machine
) -> list[Level]:
    """Check all levels as they will run, and return them with flags, values and task.

    Raises ConfigError for problems of the config itself, BenchmarkError with every problem of the
    other levels.
    """
    checked: list[Level] = []
    refused: dict[str, ConfigError] = {}
    for level in levels:
        try:
            checked.append(_check(level, folder, common, ranks, machine))
        except ConfigError as error:
            if level is levels[0]:
                raise
            refused[level.name] = error
    if refused:
        raise BenchmarkError(_refusal(refused, len(levels)))
    return checked


def _refusal(refused: Mapping[str, ConfigError], count: int) -> str:
    """Return the text of an error: the problems of each level that cannot run."""
    lines = [f"{len(refused)} of {count} levels cannot run; nothing was started"]
    for name, error in refused.items():
        lines.append(f"  level {name}:")
        for problem in error.problems:
            lines.append("    " + str(problem).replace("\n", "\n    "))
    skips = " ".join(f"--skip {name}" for name in refused)
    lines.append(f"to run the others: {skips}")
    return "\n".join(lines)


def _check(
    level: Level, folder: Path, common: Sequence[str], ranks: int, machine: Machine
) -> Level:
    arguments = [f"--job.config_file={folder / level.name}.toml", *common]
    if not machine.gpus and read(arguments)[0].value("float8.enable_float8_linear"):
        level = replace(level, flags=("--float8.emulate=true",))
    config, run_config = check_config([*arguments, *level.flags], ranks)
    d = config.sections
    problems: list[Problem] = []
    if d.training.compile:
        # It needs torch.
        from titanlite.assembly.preflight import compile_problems

        problems += compile_problems(d.training, d.compile, "cuda" if machine.gpus else "cpu")
    if d.float8.enable_float8_linear and not d.float8.emulate:
        problems += machine.no_float8
    refuse(problems)
    values = config_values(config.to_toml())
    del values["job.dump_folder"]
    task = {key: value for key, value in values.items() if key.startswith("model.") or key in _TASK}
    task["sequences per step"] = run_config.batch.global_batch_size
    return replace(level, values=values, task=task)


def differences(left: Mapping[str, Any], right: Mapping[str, Any]) -> list[str]:
    """Return the names whose values differ."""
    return [name for name in {**left, **right} if left.get(name) != right.get(name)]
