"""The command line of the AWS FSDP samples (`train.py --max_steps=… --lr=…`) as a TOML file.

Their defaults are written out where they differ from titanlite's, so that the file means what the command meant.
"""

from __future__ import annotations

import os
import shlex
from pathlib import Path
from typing import Any

from titanlite.config.checks import contradictions
from titanlite.config.errors import ConfigError, Problem
from titanlite.config.keys import keys
from titanlite.config.load import read_text
from titanlite.config.toml import quote, quote_key
from titanlite.tools.migrate import Change, Migration

_MODELS = {"llama_v2": ("llama2", "7B"), "llama_v3": ("llama3", "8B")}
_OTHER_MODEL = f"only {' and '.join(_MODELS)} are Llama models"
#: Argument → its default there (or its type, where it has none), and the key here where the value is the same.
_SAME = {
    "train_batch_size": (2, "training.batch_size"),
    "max_context_width": (2048, "training.seq_len"),
    "seed": (12345, "training.seed"),
    "grad_clip": (1.0, "training.max_norm"),
    "lr": (1e-4, "optimizer.lr"),
    "weight_decay": (0.2, "optimizer.weight_decay"),
    "beta1": (0.9, "optimizer.beta1"),
    "beta2": (0.95, "optimizer.beta2"),
    "lr_decay_style": ("cosine", "lr_scheduler.decay_type"),
    "lr_decay_iters": (int, "lr_scheduler.total_steps"),
    "min_lr": (1e-5, "lr_scheduler.min_lr"),
    "warmup": (0.0032, "lr_scheduler.warmup_ratio"),
    "logging_freq": (1, "metrics.log_freq"),
}
#: Argument → its default or type, key here, value if it is above 0 and if it is not.
_SWITCHES = {
    "bf16": (1, "training.mixed_precision_param", "bfloat16", "float32"),
    "activation_checkpointing": (1, "activation_checkpoint.mode", "full", "none"),
    "offload_activations": (0, "activation_checkpoint.offload", True, False),
    "cpu_offload": (0, "training.enable_cpu_offload", True, False),
}
#: Argument → its default or type, key of `model.overrides`.
_WIDTHS = {
    "hidden_width": (768, "dim"),
    "num_layers": (12, "n_layers"),
    "num_heads": (12, "n_heads"),
    "num_key_value_heads": (int, "n_kv_heads"),
    "intermediate_size": (11008, "ffn_dim"),
}
#: Argument → its default or type, and why it may have no equivalent. `_Translation.run` has its meaning.
_OTHERS = {
    "max_steps": (5000, ""),
    "epochs": (int, "training.steps and epochs exclude each other; the steps end the run"),
    "plateau": (0.0, 'read with lr_decay_style = "plateau" only'),
    "sharding_strategy": ("full", "set training.data_parallel_replicate_degree to the number of machines"),
    "dataset": ("c4", "give a local copy as training.dataset_path"),
    "tokenizer": (str, "give the tokenizer's file as model.tokenizer_path"),
    "model_type": (str, _OTHER_MODEL),
    "vocab_size": (50432, _OTHER_MODEL),
    "validation_freq": (int, ""),
    **dict.fromkeys(("validation_batches", "val_batch_size"), (int, "read with --validation_freq only")),
    "checkpoint_dir": (str, ""),
    "checkpoint_freq": (1000, "read with --checkpoint_dir only"),
    "resume_from_checkpoint": (str, "a run resumes by itself, from the folder where it saves"),
    "tensorboard_dir": (str, ""),
}
_DEFAULTS: dict[str, Any] = {
    name: row[0] for table in (_SAME, _SWITCHES, _WIDTHS, _OTHERS) for name, row in table.items()
}
#: Argument → why it has no equivalent, if nothing here takes it.
_REASONS = {
    **{name: reason for name, (_, reason) in _OTHERS.items()},
    **dict.fromkeys(_WIDTHS, _OTHER_MODEL),
    "dataset_config_name": "give the folder of that part as training.dataset_path",
    "same_seed": "the weights depend on training.seed alone, on any number of ranks",
    **dict.fromkeys(("limit_all_gathers", "activation_loading_horizon"), "FSDP2 needs no such setting"),
    **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop", "summary_first_pdrop"), "Llama models have no dropout"),
    "initializer_range": "the deviation of the initial weights is fixed",
    **dict.fromkeys(("rotary_pct", "rotary_emb_base"), "only other model types there read it"),
}


def migrate_arguments(text: str) -> Migration:
    """Return the TOML of a command line of the AWS FSDP samples: its arguments, as in a shell, on one or more lines.

    Raises ConfigError for words that make no arguments, and for values that are wrong here.
    """
    translation = _Translation(_parse(text))
    new = translation.run()
    config, problems = read_text(new, Path("migrated.toml"))
    if problems := problems or contradictions(config):
        raise ConfigError(problems)
    return Migration(new, tuple(translation.changes))


def _parse(text: str) -> dict[str, Any]:
    """Return the arguments that are given, each of its own type."""
    given: dict[str, Any] = {}
    problems: list[Problem] = []

    def problem(key: str, message: str) -> None:
        problems.append(Problem("--aws-fsdp", key, message, code="bad-flag"))

    try:
        words = shlex.split(text.replace("\\\n", " "), comments=True)
    except ValueError as error:
        words = []
        problem("", f"cannot be read as a shell would: {error}")
    while words:
        word = words.pop(0)
        if not word.startswith("--"):
            problem("", f"unexpected word {quote(word)}; give --name=value ...")
            continue
        name, equals, value = word[2:].partition("=")
        if not equals and words and not words[0].startswith("--"):
            value = words.pop(0)
        name = "max_steps" if name == "max_training_steps" else name
        default = _DEFAULTS.get(name, "")
        kind = default if isinstance(default, type) else type(default)
        try:
            given[name] = kind(value)
        except ValueError:
            problem(f"--{name}", f"expected {'an integer' if kind is int else 'a number'}, got {quote(value)}")
    if problems:
        raise ConfigError(problems)
    return given


class _Translation:
    """One command line on its way into keys."""

    def __init__(self, given: dict[str, Any]) -> None:
        self.given = given
        #: Key → value and comment.
        self.values: dict[str, tuple[Any, str]] = {
            "lr_scheduler.style": ("fsdp", "their formulas"),
            "metrics.log_style": ("fsdp", "their step line"),
        }
        self.changes: list[Change] = []
        self.used: set[str] = set()

    def get(self, name: str) -> Any:
        default = _DEFAULTS[name]
        return self.given.get(name, None if isinstance(default, type) else default)

    def set(self, key: str, value: Any, *names: str) -> None:
        """Give a key its value; names: the arguments that decide it, of which some may be at their defaults."""
        self.used.update(names)
        said = ", ".join(f"--{name}" for name in names if name in self.given)
        if said or value != keys()[".".join(key.split(".")[:2])].default:
            self.values[key] = (value, said or "default of the AWS FSDP samples")
            text = f"{key} = {quote(value)}"
            change = ("rewritten", f"{said} -> {text}") if said else ("written out", f"{text}, the default there")
            self.changes.append(Change(change[0], "command line", change[1]))  # type: ignore[arg-type]

    def run(self) -> str:
        """Translate all arguments; return the TOML file."""
        get, given, put = self.get, self.given, self.set
        kind = get("model_type")
        if kind in _MODELS or kind is None and {*_WIDTHS, "vocab_size"} & given.keys():
            family, flavor = _MODELS[kind or "llama_v2"]
            put("model.name", family, "model_type")
            self.values["model.flavor"] = (flavor, "all its widths are replaced below")
            put("model.vocab_size", get("vocab_size"), "vocab_size")
            for name, (_, width) in _WIDTHS.items():
                put(f"model.overrides.{width}", get("num_heads") if get(name) is None else get(name), name)
        for name, (_, key) in _SAME.items():
            put(key, get(name), name)
        for name, (_, key, on, off) in _SWITCHES.items():
            put(key, on if get(name) > 0 else off, name)
        put("training.mixed_precision_reduce", "bfloat16" if get("bf16") > 0 else "float32", "bf16")
        length = "epochs" if "epochs" in given and "max_steps" not in given else "max_steps"
        put(f"training.{length.removeprefix('max_')}", get(length), length)
        if get("lr_decay_style") == "plateau":
            put("lr_scheduler.plateau_ratio", get("plateau"), "plateau", "lr_decay_style")
        if get("sharding_strategy") != "hybrid":
            put("training.data_parallel_shard_degree", -1, "sharding_strategy")
        if get("dataset") in ("c4", "allenai/c4"):
            put("training.dataset", "c4", "dataset")
        elif _is_path(get("dataset")):
            put("training.dataset_path", get("dataset"), "dataset")
        if _is_path(get("tokenizer")):
            put("model.tokenizer_path", get("tokenizer"), "tokenizer")
        if get("validation_freq") is not None:
            self.values["validation.enable"] = (True, "--validation_freq")
            put("validation.freq", get("validation_freq"), "validation_freq")
            put("validation.steps", get("validation_batches") or 10, "validation_batches")
            put("validation.batch_size", get("val_batch_size") or 4, "val_batch_size")
        if get("tensorboard_dir") is not None:
            self.values["metrics.enable_tensorboard"] = (True, "--tensorboard_dir")
            put("metrics.save_tb_folder", get("tensorboard_dir"), "tensorboard_dir")
        if folder := [name for name in ("checkpoint_dir", "resume_from_checkpoint") if get(name) is not None]:
            self.values["checkpoint.enable_checkpoint"] = (True, "with the newest good one resumed by itself")
            put("checkpoint.folder", get(folder[0]), folder[0])
            put("checkpoint.interval", get("checkpoint_freq"), "checkpoint_freq")
        left = [
            f"--{n}={v}: no equivalent: {_REASONS.get(n, 'unknown here')}"
            for n, v in given.items()
            if n not in self.used
        ]
        self.changes += [Change("no equivalent", "command line", text) for text in left]
        lines = ["# From a command line of the AWS FSDP samples. Relative folders are below job.dump_folder."]
        lines += [f"# {text}" for text in left]
        order, section = list(keys()), ""
        for key in sorted(self.values, key=lambda key: order.index(".".join(key.split(".")[:2]))):
            first, *rest = key.split(".")
            if first != section:
                section = first
                lines += ["", f"[{section}]"]
            value, why = self.values[key]
            lines.append(f"{'.'.join(map(quote_key, rest))} = {quote(value)}  # {why}")
        return "\n".join([*lines, ""])


def _is_path(text: str | None) -> bool:
    return text is not None and (os.path.exists(text) or text.startswith((".", "/", "~")))
