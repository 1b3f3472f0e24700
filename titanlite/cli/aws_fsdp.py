"""The command line of the AWS FSDP samples (`train.py --max_steps=… --lr=…`) as a TOML file.

Their defaults are written out, so that the file means what the command meant.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from titanlite.config.errors import bad_flag
from titanlite.config.keys import keys
from titanlite.config.load import read_text
from titanlite.config.toml import quote
from titanlite.config.trust import Origin
from titanlite.resolve.load import check_alone

_MODELS = {"llama_v2": ("llama2", "7B"), "llama_v3": ("llama3", "8B")}
#: Argument → its default there, or its type if it has none; and the key here, or why it has none.
ARGUMENTS: dict[str, tuple[Any, str]] = {
    "vocab_size": (50432, "model.vocab_size"),
    "hidden_width": (768, "model.overrides.dim"),
    "num_layers": (12, "model.overrides.n_layers"),
    "num_heads": (12, "model.overrides.n_heads"),
    "num_key_value_heads": (int, "model.overrides.n_kv_heads"),
    "intermediate_size": (11008, "model.overrides.ffn_dim"),
    "train_batch_size": (2, "training.batch_size"),
    "max_context_width": (2048, "training.seq_len"),
    "max_steps": (5000, "training.steps"),
    "epochs": (int, "training.epochs"),
    "seed": (12345, "training.seed"),
    "grad_clip": (1.0, "training.max_norm"),
    "bf16": (1, "training.mixed_precision_param"),
    "cpu_offload": (0, "training.enable_cpu_offload"),
    "lr": (1e-4, "optimizer.lr"),
    "weight_decay": (0.2, "optimizer.weight_decay"),
    "beta1": (0.9, "optimizer.beta1"),
    "beta2": (0.95, "optimizer.beta2"),
    "lr_decay_style": ("cosine", "lr_scheduler.decay_type"),
    "lr_decay_iters": (int, "lr_scheduler.total_steps"),
    "min_lr": (1e-5, "lr_scheduler.min_lr"),
    "warmup": (0.0032, "lr_scheduler.warmup_ratio"),
    "plateau": (0.0, "lr_scheduler.plateau_ratio"),
    "activation_checkpointing": (1, "activation_checkpoint.mode"),
    "offload_activations": (0, "activation_checkpoint.offload"),
    "logging_freq": (1, "metrics.log_freq"),
    "tensorboard_dir": (str, "metrics.save_tb_folder"),
    "validation_freq": (int, "validation.freq"),
    "validation_batches": (10, "validation.steps"),
    "val_batch_size": (4, "validation.batch_size"),
    "checkpoint_dir": (str, "checkpoint.folder"),
    "checkpoint_freq": (1000, "checkpoint.interval"),
    "dataset": ("c4", "training.dataset_path"),
    "tokenizer": (str, "model.tokenizer_path"),
    "model_type": (str, f"only {' and '.join(_MODELS)} are Llama models"),
    "sharding_strategy": (
        str,
        "training.data_parallel_replicate_degree is the number of machines, for hybrid sharding",
    ),
    "resume_from_checkpoint": (str, "a run resumes by itself, from checkpoint.folder"),
}
#: Key → its value for a number above 0, and for another one.
_SWITCHES: dict[str, tuple[Any, Any]] = {
    "training.mixed_precision_param": ("bfloat16", "float32"),
    "activation_checkpoint.mode": ("full", "none"),
    "activation_checkpoint.offload": (True, False),
    "training.enable_cpu_offload": (True, False),
}
#: Argument → the key that it switches on.
_SWITCHED_ON = {
    "tensorboard_dir": "metrics.enable_tensorboard",
    "validation_freq": "validation.enable",
    "checkpoint_dir": "checkpoint.enable_checkpoint",
}
#: Argument → the argument without which it is not read.
_READ_WITH = {
    "validation_batches": "validation_freq",
    "val_batch_size": "validation_freq",
    "checkpoint_freq": "checkpoint_dir",
}


def to_toml(text: str) -> str:
    """Return the TOML of a command line as in a shell, on one or more lines.

    What is left out is named in comments. Raises ConfigError for words that make no arguments, and
    for values that are wrong here.
    """
    given = _parse(text)
    values = _translated(given)
    lines = [
        "# From a command line of the AWS FSDP samples. Relative folders are below job.dump_folder."
    ]
    for name, value in given.items():
        key = ARGUMENTS.get(name, ("", "no key here"))[1]
        if key not in values:
            lines.append(f"# left out: --{name}={value} ({key})")
    section = ""
    order = list(keys())
    for key in sorted(values, key=lambda key: order.index(".".join(key.split(".")[:2]))):
        first, _, name = key.partition(".")
        if first != section:
            section = first
            lines += ["", f"[{section}]"]
        lines.append(f"{name} = {quote(values[key])}")
    toml = "\n".join(lines)
    config, problems = read_text(toml, Path("aws-fsdp.toml"), origin=Origin.OWN)
    check_alone(config, problems)
    return toml


def _parse(text: str) -> dict[str, Any]:
    """Return the arguments that are given, each in its type."""
    try:
        words = shlex.split(text.replace("\\\n", " "), comments=True)
    except ValueError as error:
        raise bad_flag("--aws-fsdp", f"cannot be read as a shell would: {error}") from None
    given: dict[str, Any] = {}
    while words:
        word = words.pop(0)
        name, equals, value = word.removeprefix("--").partition("=")
        if not word.startswith("--"):
            raise bad_flag("--aws-fsdp", f"unexpected word {quote(word)}; give --name=value ...")
        if not equals and words and not words[0].startswith("--"):
            value = words.pop(0)
        name = "max_steps" if name == "max_training_steps" else name
        default = ARGUMENTS.get(name, (str, ""))[0]
        kind = default if isinstance(default, type) else type(default)
        try:
            given[name] = kind(value)
        except ValueError:
            raise bad_flag(f"--{name}", f"expected a number, got {quote(value)}") from None
    return given


def _translated(given: dict[str, Any]) -> dict[str, Any]:
    """Return the values by key, those of defaults too. What becomes a name of titanlite is taken
    out of `given`.
    """
    defaults = {name: one for name, (one, _) in ARGUMENTS.items() if not isinstance(one, type)}
    taken = defaults | given
    values: dict[str, Any] = {"lr_scheduler.style": "fsdp", "metrics.log_style": "aws_fsdp"}
    if "resume_from_checkpoint" in given:
        taken.setdefault("checkpoint_dir", given["resume_from_checkpoint"])
    if taken["lr_decay_style"] != "plateau":
        del taken["plateau"]
    if "epochs" in given:
        del taken["epochs" if "max_steps" in given else "max_steps"]
    widths = [name for name, (_, key) in ARGUMENTS.items() if key.startswith("model.overrides")]
    is_llama = bool(given.keys() & {*widths, "vocab_size"})
    kind = given.get("model_type", "llama_v2" if is_llama else "")
    if kind in _MODELS:
        given.pop("model_type", None)
        values["model.name"], values["model.flavor"] = _MODELS[kind]
        taken.setdefault("num_key_value_heads", taken["num_heads"])
    else:
        for name in (*widths, "vocab_size"):
            taken.pop(name, None)
    if taken["dataset"] in ("c4", "allenai/c4"):
        given.pop("dataset", None)
        values["training.dataset"] = "c4"
    for name in ("dataset", "tokenizer"):
        path = taken.get(name, "")
        if not (os.path.exists(path) or path.startswith((".", "/", "~"))):
            taken.pop(name, None)
    values |= _by_key(taken)
    values["training.mixed_precision_reduce"] = values["training.mixed_precision_param"]
    return values


def _by_key(taken: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of those arguments that are one key each."""
    values: dict[str, Any] = {}
    for name, (_, key) in ARGUMENTS.items():
        if " " in key or not {name, _READ_WITH.get(name, name)} <= taken.keys():
            continue
        values[key] = taken[name]
        if key in _SWITCHES:
            values[key] = _SWITCHES[key][taken[name] <= 0]
        if name in _SWITCHED_ON:
            values[_SWITCHED_ON[name]] = True
    return values
