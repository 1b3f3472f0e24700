"""A tiny copy of a config for the drill.

It has the same features and kinds of parallelism, and trains in seconds on CPUs.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from titanlite.config.errors import ConfigError, Problem, refuse
from titanlite.config.load import read
from titanlite.config.sections import AUTO_FILTER, Config
from titanlite.config.text_names import BUNDLED_TOKENIZER_NAME
from titanlite.config.toml import quote
from titanlite.models.args import FROM_FOLDER
from titanlite.models.llama_shapes import SHAPES
from titanlite.start.fit import check_config, shaped
from titanlite.tools import refuse_keys

#: Steps of a whole run.
STEPS = 8
#: Steps of its first half.
HALF = 4
#: Steps between saves.
INTERVAL = 2
#: Kinds of parallelism, kept at degree 2 as far as the ranks suffice, in this order.
_DEGREES = {
    "training.tensor_parallel_degree": "tensor_parallel",
    "experimental.pipeline_parallel_degree": "pipeline_parallel",
    "experimental.context_parallel_degree": "context_parallel",
    "training.data_parallel_replicate_degree": "data_parallel_replicate",
}
#: Flags for one rank without parallelism.
ONE_RANK = [f"--{key}=1" for key in _DEGREES]
_MOST_RANKS = 4
#: More entries than the bundled tokenizers have, and divisible by all degrees.
_VOCABULARY = 4096
#: Section -> keys with the same value for every config.
_FIXED: dict[str, dict[str, Any]] = {
    "model": {"vocab_size": _VOCABULARY, "tokenizer_path": BUNDLED_TOKENIZER_NAME},
    "training": {"dataset": "c4_test", "dataset_path": None, "seq_len": 32, "steps": STEPS},
    "lr_scheduler": {"total_steps": STEPS, "unit": "steps"},
    "checkpoint": {
        **{
            "enable_checkpoint": True,
            "folder": "checkpoint",
            "interval_type": "steps",
            "interval": INTERVAL,
        },
        **{
            "start": "resume-or-fresh",
            "load_step": -1,
            "initial_load_path": None,
            "keep_latest_k": 3,
        },
        **{"model_weights_only": False, "last_save_in_hf": False},
        **{"create_seed_checkpoint": False, "enable_first_step_checkpoint": False},
    },
    "validation": {
        **{"freq": INTERVAL, "first": False, "steps": 2, "batch_size": 2, "seq_len": 32},
        **{"dataset": "c4_validation", "dataset_path": None},
    },
    "metrics": {
        "log_freq": 1,
        "enable_color_printing": False,
        "enable_tensorboard": False,
        "enable_wandb": False,
        "trackers": [],
    },
    "profiling": {"enable_profiling": False, "enable_memory_snapshot": False},
    "sample": {"prompts": []},
    "eval": {"tasks": [], "ema": False},
    # There are no weights under them.
    "lora": {"rank": 0},
    "job": {"print_config": False, "save_config_file": None},
}


@dataclass(frozen=True)
class TinyConfig:
    """The config that the drill trains."""

    ranks: int
    #: For `train.py`, without `job.dump_folder` and `data.token_cache`.
    arguments: tuple[str, ...]
    #: The sections.
    config: Config
    #: What it keeps of the user's config, and what not, in lines.
    notes: tuple[str, ...]


def tiny_config(
    config: str, flags: Sequence[str], ranks: int | None = None, compiled: bool = False
) -> TinyConfig:
    """Return the tiny copy of a config file with flags over it, trained on the bundled text.

    ranks: None for 2, or as many as its kinds of parallelism need. compiled: leave training.compile
    as it is.

    Raises ConfigError if the copy cannot be trained, and for flags of keys that the drill sets
    itself.
    """
    argv = [f"--job.config_file={config}", *flags]
    base, problems = read(argv)
    refuse(problems)
    d = base.sections
    if d.model.name == "hf":
        message = "the drill shrinks a model by dim and n_layers, which models of transformers lack"
        hint = "name a family of titanlite's"
        raise ConfigError([Problem(base.place("model.name"), "model.name", message, hint)])
    if d.model.flavor == FROM_FOLDER:
        d = shaped(base).sections
    wanted = [key for key in _DEGREES if base.value(key) > 1]
    ranks = ranks or max(2, min(_MOST_RANKS, 2 ** len(wanted)))
    degrees, shard = _divided(wanted, ranks)
    fixed = {}
    for section, section_values in _FIXED.items():
        for key, value in section_values.items():
            fixed[f"{section}.{key}"] = value
    fixed |= _sizes(d, degrees, shard)
    own = {"job.dump_folder", "job.config_file", "training.tokens", "training.epochs", *fixed}
    refuse_keys(flags, dict.fromkeys(own, "the drill has its own sizes and folders"))
    values = {**fixed, **degrees, **_adjusted(d, shard, compiled)}
    for key, value in values.items():
        argv.append(f"--{key}={value if isinstance(value, str) else quote(value)}")
    tiny = check_config(argv, ranks)[0].sections
    kept = [f"{_DEGREES[key]} 2, " for key in wanted if degrees[key] > 1]
    lost = [_DEGREES[key] for key in wanted if degrees[key] == 1]
    notes = [
        f"model    {d.model.name} {d.model.flavor} at dim {values['model.overrides.dim']}, "
        f"n_layers {values['model.overrides.n_layers']}, the bundled text and tokenizer",
        f"ranks    {ranks} CPU processes: {''.join(kept)}data_parallel_shard {shard}",
        f"run      {STEPS} steps, saved every {INTERVAL}, async_mode = "
        f"{d.checkpoint.async_mode!r}, activation checkpointing "
        f"{tiny.activation_checkpoint.mode}, {d.training.mixed_precision_param}",
    ]
    if lost:
        notes.append(f"not tested on {ranks} ranks: {', '.join(lost)}")
    if d.training.compile and not compiled:
        notes.append("training.compile is off; --compile leaves it on, which takes minutes")
    return TinyConfig(ranks, tuple(argv), tiny, tuple(notes))


def _divided(wanted: Sequence[str], ranks: int) -> tuple[dict[str, int], int]:
    """Return the degrees of parallelism by key, and the ranks that shard the weights.

    As many degrees as the ranks allow are 2.
    """
    degrees = dict.fromkeys(_DEGREES, 1)
    shard = ranks
    for key in wanted:
        if shard % 2 == 0:
            degrees[key] = 2
            shard //= 2
    return degrees, shard


def _sizes(d: Config, degrees: dict[str, int], shard: int) -> dict[str, Any]:
    """Return the sizes of model and batch by key: any degree of 2 divides them, and grouped heads
    stay grouped.
    """
    has_pipeline = degrees["experimental.pipeline_parallel_degree"] > 1
    flavor = SHAPES.get(d.model.name, {}).get(d.model.flavor)
    heads = d.model.overrides.get("n_kv_heads", flavor.n_kv_heads if flavor else None)
    shape = {
        "dim": 64,
        "n_layers": 4 if has_pipeline else 2,
        "n_heads": 4,
        "n_kv_heads": 4 if heads is None else 2,
        "ffn_dim": 128,
    }
    if "vocab_size" in d.model.overrides:
        shape["vocab_size"] = _VOCABULARY
    values: dict[str, Any] = {}
    if d.model.flavor == FROM_FOLDER:
        values |= {"model.flavor": "debugmodel", "model.hf_config": None}
    for name, size in shape.items():
        values[f"model.overrides.{name}"] = size
    micro = 2 if has_pipeline else 1
    readers = shard * degrees["training.data_parallel_replicate_degree"]
    values["training.batch_size"] = micro
    values["training.global_batch_size"] = micro * (4 if 4 % readers == 0 else 2 * readers)
    if d.lr_scheduler.warmup_ratio is None:
        values["training.warmup_steps"] = 2
    return values


def _adjusted(d: Config, shard: int, compiled: bool) -> dict[str, Any]:
    """Return new values, by key, where the config's do not work at this size or without a feature
    that is off.
    """
    compiles = d.training.compile and compiled
    has_async_tp = d.experimental.enable_async_tensor_parallel
    values: dict[str, Any] = {
        "training.compile": compiles,
        "training.seed": d.training.seed or 0,
        "training.data_parallel_shard_degree": -1,
        "training.fsdp_min_params": 1000,
        "training.prefetch": min(d.training.prefetch, 1),
        "training.loss_chunks": min(d.training.loss_chunks, 2),
        "experimental.enable_async_tensor_parallel": has_async_tp and compiles,
        "experimental.pipeline_parallel_split_points": [],
        "experimental.pipeline_parallel_microbatches": None,
        # They would be further saves.
        "checkpoint.milestones": [],
        "validation.enable": True,
        "data.source": [],
        "data.phase": [],
        "validation.sources": [],
    }
    if d.parallelism.expert_parallel_degree > 1:
        values["parallelism.expert_parallel_degree"] = shard
    if d.activation_checkpoint.mode == "budget" and not compiles:
        values["activation_checkpoint.mode"] = "full"
    if isinstance(d.training.reshard_after_forward, int):
        values["training.reshard_after_forward"] = 2 if shard % 2 == 0 and shard > 2 else "always"
    if d.float8.enable_float8_linear:
        # The tiny model may lack the named layers, and its linears are small.
        names = [
            name
            for name in d.float8.filter_fqns
            if not re.search(r"(^|\.)\d", name) and name != AUTO_FILTER
        ]
        values |= {"float8.emulate": True, "float8.filter_fqns": names, "float8.min_features": 0}
    return values
