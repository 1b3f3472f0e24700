"""The command line of the AWS FSDP samples (`train.py --max_steps=… --lr=…`) as a TOML file.

Their defaults are written out, so that the file means what the command meant.
"""

from __future__ import annotations

import os
import shlex
from pathlib import Path
from typing import Any

from titanlite.config.errors import bad_flag
from titanlite.config.keys import keys
from titanlite.config.load import read_text
from titanlite.config.toml import quote
from titanlite.config.trust import Origin
from titanlite.resolve.load import check_alone

_MODELS = {"llama_v2": ("llama2", "7B"), "llama_v3": ("llama3", "8B")}
_C4 = ("c4", "allenai/c4")
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
    values: dict[str, Any] = {"lr_scheduler.style": "fsdp", "metrics.log_style": "aws_fsdp"}
    kind = given.get("model_type")
    if kind is None and any(_is_width(name) for name in given):
        kind = "llama_v2"
    if kind in _MODELS:
        given.pop("model_type", None)
        values["model.name"], values["model.flavor"] = _MODELS[kind]
    taken = _read_arguments(given, kind in _MODELS)
    if taken.get("dataset") in _C4:
        given.pop("dataset", None)
        del taken["dataset"]
        values["training.dataset"] = "c4"
    for name, value in taken.items():
        key = ARGUMENTS[name][1]
        values[key] = value
        if key in _SWITCHES:
            values[key] = _SWITCHES[key][value <= 0]
        if name in _SWITCHED_ON:
            values[_SWITCHED_ON[name]] = True
    values["training.mixed_precision_reduce"] = values["training.mixed_precision_param"]
    return values


def _is_width(name: str) -> bool:
    key = ARGUMENTS.get(name, ("", ""))[1]
    return key.startswith(("model.overrides.", "model.vocab_size"))


def _read_arguments(given: dict[str, Any], is_llama: bool) -> dict[str, Any]:
    """Return the arguments with a key that the samples read beside these, at their defaults too."""
    defaults = {name: one for name, (one, _) in ARGUMENTS.items() if not isinstance(one, type)}
    taken = defaults | given
    if "resume_from_checkpoint" in given:
        taken.setdefault("checkpoint_dir", given["resume_from_checkpoint"])
    taken.setdefault("num_key_value_heads", taken["num_heads"])
    unread = {name for name, other in _READ_WITH.items() if other not in taken}
    if taken["lr_decay_style"] != "plateau":
        unread.add("plateau")
    if "epochs" in given:
        unread.add("epochs" if "max_steps" in given else "max_steps")
    for name in ("dataset", "tokenizer"):
        if taken.get(name) not in _C4 and not _is_path(taken.get(name, "")):
            unread.add(name)
    found = {}
    for name, (_, key) in ARGUMENTS.items():
        is_read = name in taken and name not in unread and (is_llama or not _is_width(name))
        if is_read and " " not in key:
            found[name] = taken[name]
    return found


def _is_path(text: str) -> bool:
    return os.path.exists(text) or text.startswith((".", "/", "~"))
