"""A config at toy size: its own features and kinds of parallelism, with a model, text and length that take seconds."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from titanlite.config.aliases import key_of
from titanlite.config.entries import command_line_entries
from titanlite.config.errors import ConfigError, Problem
from titanlite.config.load import read
from titanlite.config.loaded import LoadedConfig
from titanlite.config.sections import AUTO_FILTER
from titanlite.config.toml import quote

#: Steps of a whole run, of its first half, and between saves.
STEPS, HALF, INTERVAL = 8, 4, 2
#: More than the bundled tokenizers have, and divisible by all degrees.
_VOCABULARY = 4096
_DEGREES = {
    "training.tensor_parallel_degree": "tensor",
    "experimental.pipeline_parallel_degree": "pipeline",
    "experimental.context_parallel_degree": "context",
    "training.data_parallel_replicate_degree": "replicate",
}
_MOST_RANKS = 4


@dataclass(frozen=True)
class Toy:
    """What is rehearsed on."""

    ranks: int
    #: For `train.py`, all but `job.dump_folder`.
    arguments: tuple[str, ...]
    plans: Plans
    #: What it has of the config and what not, in lines.
    notes: tuple[str, ...]

    @property
    def alone(self) -> tuple[str, ...]:
        """The arguments on another number of ranks: one, without its kinds of parallelism."""
        return (*self.arguments, *(f"--{key}=1" for key in _DEGREES))


def shrink(config: str, flags: Sequence[str], text: Path, ranks: int | None = None, compiled: bool = False) -> Toy:
    """The toy of a config file with flags over it, trained on the file `text`.

    ranks: None for two, or as many as its parallelisms need. compiled: leave training.compile as it is.

    Raises ConfigError for a config that could not be trained at toy size, and for flags of what the toy decides itself.
    """
    argv = [f"--job.config_file={config}", *flags]
    base, problems = read(argv)
    if problems:
        raise ConfigError(problems)
    degrees = {key: base.value(key) for key in _DEGREES}
    wanted = [key for key, degree in degrees.items() if degree > 1]
    if ranks is None:
        ranks = max(2, min(_MOST_RANKS, 2 ** len(wanted)))
    kept: dict[str, int] = {}
    left = ranks
    for key in _DEGREES:
        kept[key] = 2 if key in wanted and left % 2 == 0 else 1
        left //= kept[key]
    notes: list[str] = []
    sizes = _sizes(base, text, kept, left)
    _refuse_own(flags, sizes)
    values = {**sizes, **_scaled(base, kept, left, compiled, notes)}
    arguments = [*argv, *(f"--{key}={_word(value)}" for key, value in values.items())]
    _, plans = checked_plans(arguments, ranks, training=True)
    return Toy(ranks, tuple(arguments), plans, (*_described(base, plans, kept), *notes))


def _word(value: Any) -> str:
    return value if isinstance(value, str) else quote(value)


def _sizes(base: LoadedConfig, text: Path, degrees: dict[str, int], left: int) -> dict[str, Any]:
    """Key -> value of what every toy has alike, whatever the config says."""
    pipeline = degrees["experimental.pipeline_parallel_degree"] > 1
    micro = 2 if pipeline else 1
    readers = left * degrees["training.data_parallel_replicate_degree"]
    values: dict[str, Any] = {
        **{f"model.overrides.{name}": value for name, value in _shape(base, pipeline).items()},
        "model.vocab_size": _VOCABULARY,
        "model.tokenizer_path": None,
        "training.dataset": "c4_test",
        "training.dataset_path": str(text),
        "training.batch_size": micro,
        "training.global_batch_size": micro * (4 if 4 % readers == 0 else 2 * readers),
        "training.seq_len": 32,
        "training.steps": STEPS,
        "lr_scheduler.total_steps": STEPS,
        "checkpoint.enable_checkpoint": True,
        "checkpoint.folder": "checkpoint",
        "checkpoint.interval_type": "steps",
        "checkpoint.interval": INTERVAL,
        "checkpoint.start": "resume-or-fresh",
        "checkpoint.load_step": -1,
        "checkpoint.initial_load_path": None,
        "checkpoint.keep_latest_k": 3,
        "checkpoint.model_weights_only": False,
        "checkpoint.last_save_in_hf": False,
        "checkpoint.create_seed_checkpoint": False,
        "checkpoint.enable_first_step_checkpoint": False,
        "validation.freq": HALF,
        "validation.steps": 2,
        "validation.batch_size": 2,
        "validation.seq_len": 32,
        "validation.dataset_path": str(text),
        "metrics.log_freq": 1,
        "metrics.enable_tensorboard": False,
        "metrics.enable_wandb": False,
        "profiling.enable_profiling": False,
        "profiling.enable_memory_snapshot": False,
        "job.print_config": False,
        "job.save_config_file": None,
    }
    if base.sections.lr_scheduler.warmup_ratio is None:
        values["training.warmup_steps"] = 2
    return values


def _shape(base: LoadedConfig, pipeline: bool) -> dict[str, Any]:
    """Sizes that any degree of two divides; grouped heads stay grouped."""
    from titanlite.models.shapes import SHAPES

    d = base.sections
    flavor = SHAPES.get(d.model.name, {}).get(d.model.flavor)
    grouped = d.model.overrides.get("n_kv_heads", flavor.n_kv_heads if flavor else None) is not None
    shape = {"dim": 64, "n_layers": 4 if pipeline else 2, "n_heads": 4, "n_kv_heads": 2 if grouped else 4}
    shape["ffn_dim"] = 128
    if "vocab_size" in d.model.overrides:
        shape["vocab_size"] = _VOCABULARY
    return shape


def _scaled(base: LoadedConfig, degrees: dict[str, int], left: int, compiled: bool, notes: list[str]) -> dict[str, Any]:
    """Key -> value of what cannot be as the config has it at this size, or without what is off."""
    d = base.sections
    values: dict[str, Any] = {
        **degrees,
        "training.data_parallel_shard_degree": -1,
        "training.compile": d.training.compile and compiled,
        "experimental.pipeline_parallel_split_points": [],
        "experimental.pipeline_parallel_microbatches": None,
    }
    if d.training.seed is None:
        values["training.seed"] = 0
    if d.training.compile and not values["training.compile"]:
        notes.append("training.compile is off; --compile leaves it on, and takes minutes")
        if d.experimental.enable_async_tensor_parallel:
            values["experimental.enable_async_tensor_parallel"] = False
        if d.activation_checkpoint.mode == "budget":
            values["activation_checkpoint.mode"] = "full"
            notes.append('activation_checkpoint.mode is "full": a budget needs the compiler')
    if d.float8.enable_float8_linear:
        values["float8.emulate"] = True
        # Layers that the toy may lack, and sizes that it has not.
        named = [name for name in d.float8.filter_fqns if not re.search(r"(^|\.)\d", name)]
        values["float8.filter_fqns"] = [name for name in named if name != AUTO_FILTER]
        values["float8.min_features"] = 0
        notes.append("float8 is emulated")
    if isinstance(d.training.reshard_after_forward, int):
        fits = left % 2 == 0 and left > 2
        values["training.reshard_after_forward"] = 2 if fits else "always"
    if d.training.fsdp_units == "size":
        values["training.fsdp_min_params"] = 1000
    if d.training.prefetch:
        values["training.prefetch"] = 1
    if d.training.loss_chunks > 1:
        values["training.loss_chunks"] = 2
    if isinstance(d.checkpoint.milestones, list):
        values["checkpoint.milestones"] = []  # one among so few steps would be a save where none is expected
    if not d.validation.enable:
        values["validation.enable"] = True
        notes.append("validation is on: one of the faults strikes in it")
    if d.data.source:
        values["data.source"] = []
    if d.validation.sources:
        values["validation.sources"] = []
    return values


def _refuse_own(flags: Sequence[str], sizes: Iterable[str]) -> None:
    """Raise ConfigError for flags of what the toy decides."""
    entries, _ = command_line_entries(flags)
    names = {entry.name: key_of(entry.name) for entry in entries}
    own = {"job.dump_folder", "job.config_file", "training.tokens", "training.epochs", *sizes}
    found = [
        Problem("command line", name, "is not to be set here", "the drill has a size and a folder of its own")
        for name, key in names.items()
        if key in own
    ]
    if found:
        raise ConfigError(found)


def _described(base: LoadedConfig, plans: Plans, kept: dict[str, int]) -> list[str]:
    d, mesh = base.sections, plans.mesh
    parallel = [f"{_DEGREES[key]}_parallel {degree}" for key, degree in kept.items() if degree > 1]
    lost = [
        f"{_DEGREES[key]}_parallel" for key, degree in kept.items() if degree == 1 and base.value(key) not in (1, -1)
    ]
    size = ", ".join(f"{name} {value}" for name, value in plans.model.overrides if name in ("dim", "n_layers"))
    lines = [
        f"model    {d.model.name} {d.model.flavor} at {size}, a part of the bundled text, the bundled tokenizer",
        f"ranks    {mesh.world_size} CPU processes: {', '.join([*parallel, f'data_parallel_shard {mesh.dp_shard}'])}",
        f"run      {STEPS} steps, saved every {INTERVAL}, async_mode = {plans.checkpoint.async_mode!r}, "
        f"activation checkpointing {d.activation_checkpoint.mode}, {plans.shard.param_dtype}",
    ]
    if lost:
        lines.append(f"not rehearsed on {mesh.world_size} ranks: {', '.join(lost)}")
    return lines
