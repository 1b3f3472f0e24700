"""A tiny copy of a config for the drill: the same features and kinds of parallelism, trained in
seconds on CPUs.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from titanlite.config.errors import ConfigError, Problem
from titanlite.config.load import read
from titanlite.config.sections import AUTO_FILTER, Config
from titanlite.config.toml import quote
from titanlite.models.args import FROM_FOLDER
from titanlite.models.llama_shapes import SHAPES
from titanlite.start.fit import check_config, shaped
from titanlite.tools import refuse_keys

#: Steps of a whole run, of its first half, and between saves.
STEPS, HALF, INTERVAL = 8, 4, 2
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
    "model": {"vocab_size": _VOCABULARY, "tokenizer_path": None},
    "training": {"dataset": "c4_test", "dataset_path": None, "seq_len": 32, "steps": STEPS},
    "lr_scheduler": {"total_steps": STEPS},
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
    },
    "profiling": {"enable_profiling": False, "enable_memory_snapshot": False},
    "sample": {"prompts": []},
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
    if problems:
        raise ConfigError(problems)
    d = base.sections
    if d.model.name == "hf":
        message = "the drill shrinks a model by dim and n_layers, which models of transformers lack"
        raise ConfigError(
            [
                Problem(
                    base.place("model.name"), "model.name", message, "name a family of titanlite's"
                )
            ]
        )
    if d.model.flavor == FROM_FOLDER:
        d = shaped(base).sections
    wanted = [key for key in _DEGREES if base.value(key) > 1]
    ranks = ranks or max(2, min(_MOST_RANKS, 2 ** len(wanted)))
    degrees, shard = dict.fromkeys(_DEGREES, 1), ranks
    for key in wanted:
        if shard % 2 == 0:
            degrees[key], shard = 2, shard // 2
    fixed = {
        f"{section}.{key}": value for section, keys in _FIXED.items() for key, value in keys.items()
    }
    fixed |= _sizes(d, degrees, shard)
    own = {"job.dump_folder", "job.config_file", "training.tokens", "training.epochs", *fixed}
    refuse_keys(flags, dict.fromkeys(own, "the drill has its own sizes and folders"))
    values = {**fixed, **degrees, **_adjusted(d, shard, compiled)}
    arguments = [
        f"--{key}={value if isinstance(value, str) else quote(value)}"
        for key, value in values.items()
    ]
    tiny = check_config([*argv, *arguments], ranks)[0].sections
    kept = [f"{_DEGREES[key]} 2, " for key in wanted if degrees[key] > 1]
    lost = [_DEGREES[key] for key in wanted if degrees[key] == 1]
    notes = [
        f"model    {d.model.name} {d.model.flavor} at dim {values['model.overrides.dim']}, "
        f"n_layers {values['model.overrides.n_layers']}, the bundled text and tokenizer",
        f"ranks    {ranks} CPU processes: {''.join(kept)}data_parallel_shard {shard}",
        f"run      {STEPS} steps, saved every {INTERVAL}, async_mode = "
        f"{d.checkpoint.async_mode!r}, activation checkpointing "
        f"{tiny.activation_checkpoint.mode}, {d.training.mixed_precision_param}",
        *([f"not tested on {ranks} ranks: {', '.join(lost)}"] if lost else []),
    ]
    if d.training.compile and not compiled:
        notes.append("training.compile is off; --compile leaves it on, which takes minutes")
    return TinyConfig(ranks, (*argv, *arguments), tiny, tuple(notes))


def _sizes(d: Config, degrees: dict[str, int], shard: int) -> dict[str, Any]:
    """Return the sizes of model and batch by key: any degree of 2 divides them, and grouped heads
    stay grouped.
    """
    pipeline = degrees["experimental.pipeline_parallel_degree"] > 1
    flavor = SHAPES.get(d.model.name, {}).get(d.model.flavor)
    grouped = d.model.overrides.get("n_kv_heads", flavor.n_kv_heads if flavor else None) is not None
    shape = {
        "dim": 64,
        "n_layers": 4 if pipeline else 2,
        "n_heads": 4,
        "n_kv_heads": 2 if grouped else 4,
    }
    shape |= {
        "ffn_dim": 128,
        **({"vocab_size": _VOCABULARY} if "vocab_size" in d.model.overrides else {}),
    }
    micro, readers = (
        2 if pipeline else 1,
        shard * degrees["training.data_parallel_replicate_degree"],
    )
    return {
        **(
            {"model.flavor": "debugmodel", "model.hf_config": None}
            if d.model.flavor == FROM_FOLDER
            else {}
        ),
        **{f"model.overrides.{name}": value for name, value in shape.items()},
        "training.batch_size": micro,
        "training.global_batch_size": micro * (4 if 4 % readers == 0 else 2 * readers),
        **({"training.warmup_steps": 2} if d.lr_scheduler.warmup_ratio is None else {}),
    }


def _adjusted(d: Config, shard: int, compiled: bool) -> dict[str, Any]:
    """Return new values, by key, where the config's do not work at this size or without a feature
    that is off.
    """
    compiles, reshard = d.training.compile and compiled, d.training.reshard_after_forward
    values: dict[str, Any] = {
        "training.compile": compiles,
        "training.seed": d.training.seed or 0,
        "training.data_parallel_shard_degree": -1,
        "training.fsdp_min_params": 1000,
        "training.prefetch": min(d.training.prefetch, 1),
        "training.loss_chunks": min(d.training.loss_chunks, 2),
        "experimental.enable_async_tensor_parallel": d.experimental.enable_async_tensor_parallel
        and compiles,
        "experimental.pipeline_parallel_split_points": [],
        "experimental.pipeline_parallel_microbatches": None,
        "checkpoint.milestones": [],  # they would be further saves
        "validation.enable": True,
        "data.source": [],
        "validation.sources": [],
    }
    if d.activation_checkpoint.mode == "budget" and not compiles:
        values["activation_checkpoint.mode"] = "full"
    if isinstance(reshard, int):
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
