"""Every run of a ladder checked before the first of them starts: config, ranks, and what this machine lacks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from titanlite.config.entries import command_line_entries
from titanlite.config.errors import ConfigError, Problem
from titanlite.config.load import read
from titanlite.config.names import ALIASES
from titanlite.config.plans import Plans
from titanlite.config.scan import loads
from titanlite.ladder.levels import SWITCHES, LadderError, Level
from titanlite.ladder.process import Machine
from titanlite.prepare import checked_plans, resolve_plans

#: What the ladder decides: key -> what to say to a flag for it.
_OWN = {
    "job.config_file": "name the config first, without a flag",
    "job.dump_folder": "every run has a folder of its own; --out names the one above them",
    **dict.fromkeys(("training.steps", "training.tokens", "training.epochs"), "--steps says how long each run is"),
    "checkpoint.enable_checkpoint": "the runs are short and keep no checkpoints",
    **dict.fromkeys(
        SWITCHES, "this is what the levels differ in: leave levels out with --skip, add others with --overlay"
    ),
}
#: Off in every run: what takes time beside training, or writes elsewhere.
_OFF = (
    *("checkpoint.enable_checkpoint", "validation.enable"),
    *("profiling.enable_profiling", "profiling.enable_memory_snapshot"),
    *("metrics.enable_tensorboard", "metrics.enable_wandb"),
)


@dataclass(frozen=True)
class Planned:
    """A level that was found right."""

    level: Level
    #: For `train.py`, all but `job.dump_folder`.
    arguments: tuple[str, ...]
    plans: Plans
    #: The resolved config by `section.key`, without what differs from run to run.
    values: Mapping[str, Any]

    @property
    def emulates(self) -> bool:
        """Whether float8 is only computed as if."""
        return self.plans.float8.enable and self.plans.float8.emulate


def refuse_own(flags: Sequence[str]) -> None:
    """Raise ConfigError for flags of what the ladder itself decides."""
    entries, _ = command_line_entries(flags)
    names = {entry.name: ALIASES[entry.name].canonical if entry.name in ALIASES else entry.name for entry in entries}
    found = [
        Problem("command line", name, "is not to be set here", _OWN[key]) for name, key in names.items() if key in _OWN
    ]
    if found:
        raise ConfigError(found)


def common_flags(config: str, flags: Sequence[str], steps: int, ranks: int) -> list[str]:
    """What is equal in all runs: their length, one seed, the learning rate of the config's own first steps."""
    found = [f"--training.steps={steps}", "--metrics.log_freq=1", "--float8.drift_check=0"]
    found += [f"--{key}=false" for key in _OFF]
    base, _ = read([f"--job.config_file={config}", *flags])
    if base.value("checkpoint.start") == "resume":
        found.append("--checkpoint.start=resume-or-fresh")
    seed = base.value("training.seed")
    found.append(f"--training.seed={0 if seed is None else seed}")
    try:
        # The schedule keeps the length it has in the config: the runs are its first steps, not a short copy of it.
        length = resolve_plans(base, ranks).schedule.total_steps
    except ConfigError:
        length = None  # reported with the levels
    if length is not None:
        found.append(f"--lr_scheduler.total_steps={length}")
    return [*found, *flags]


def check_levels(
    levels: Sequence[Level], folder: Path, common: Sequence[str], ranks: int, machine: Machine
) -> list[Planned]:
    """All levels as they will run, their files being in `folder`.

    Raises LadderError that names each level that is refused, all that is wrong with it, and how to leave it out.
    """
    planned: list[Planned] = []
    refused: dict[str, Sequence[Problem]] = {}
    for level in levels:
        try:
            planned.append(_check(level, folder, common, ranks, machine))
        except ConfigError as error:
            refused[level.name] = error.problems
    if refused:
        raise LadderError(_refusal(refused, len(levels)))
    return planned


def _check(level: Level, folder: Path, common: Sequence[str], ranks: int, machine: Machine) -> Planned:
    arguments = [f"--job.config_file={folder / level.file}", *common]
    if machine.device_type == "cpu" and read(arguments)[0].value("float8.enable_float8_linear"):
        arguments.append("--float8.emulate=true")
    _, plans = checked_plans(arguments, ranks, training=True)
    _check_machine(plans, machine)
    resolved = loads(plans.config_toml).items()
    values = {f"{section}.{key}": value for section, keys in resolved for key, value in keys.items()}
    values.pop("job.dump_folder", None)
    return Planned(level, tuple(arguments), plans, values)


def _check_machine(plans: Plans, machine: Machine) -> None:
    """Raise ConfigError for what `train.py` would refuse on this machine when it starts."""
    if plans.compile.model or plans.compile.loss:
        from titanlite.parallel.compile import prepare_compile  # needs torch

        prepare_compile(plans.compile, machine.device_type)
    if plans.float8.enable and not plans.float8.emulate and machine.no_float8:
        raise ConfigError([Problem("", "float8.enable_float8_linear", *machine.no_float8)])


def _refusal(refused: Mapping[str, Sequence[Problem]], count: int) -> str:
    """What is wrong in all levels once, then what is wrong with each."""
    first = next(iter(refused.values()))
    shared = [p for p in first if len(refused) == count and all(p in problems for problems in refused.values())]
    lines = [f"{len(refused)} of {count} levels cannot run; nothing was started"]
    if shared:
        lines += ["  all levels:", *(_indented(problem) for problem in shared)]
    own = {name: [p for p in problems if p not in shared] for name, problems in refused.items()}
    for name, problems in own.items():
        if problems:
            lines += [f"  level {name}:", *(_indented(problem) for problem in problems)]
    if len(refused) < count:
        lines.append(f"to run the others: {' '.join(f'--skip {name}' for name in refused)}")
    return "\n".join(lines)


def _indented(problem: Problem) -> str:
    return "    " + str(problem).replace("\n", "\n    ")


def what_differs(base: Plans, other: Plans) -> list[str]:
    """What makes losses at equal steps another thing: weights, text, or the sequences of a step."""
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
