"""The command line of the AWS FSDP samples (`train.py --max_steps=… --lr=…`) as a TOML file.

Their defaults are written out where they differ from titanlite's, so that the file means what the command meant.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from titanlite.config.checks import contradictions
from titanlite.config.errors import ConfigError, Problem
from titanlite.config.load import read_text
from titanlite.config.migrate import Change, Migration
from titanlite.config.schema import keys, quote, quote_key

_WHERE = "command line"


@dataclass(frozen=True)
class Argument:
    """One argument there."""

    kind: Callable[[str], Any]
    default: Any = None
    #: The key here, where the value is the same.
    key: str = ""
    #: Why it stays behind, where it has no key of its own.
    reason: str = ""


_NO_DROPOUT = "Llama models have no dropout"
_OTHER_MODEL = "only other model types there read it"
_FSDP1 = "a setting of the first FSDP; the second does it by itself"

ARGUMENTS: dict[str, Argument] = {
    "train_batch_size": Argument(int, 2, "training.batch_size"),
    "max_context_width": Argument(int, 2048, "training.seq_len"),
    "max_steps": Argument(int, 5000, "training.steps"),
    "seed": Argument(int, 12345, "training.seed"),
    "grad_clip": Argument(float, 1.0, "training.max_norm"),
    "lr": Argument(float, 1e-4, "optimizer.lr"),
    "weight_decay": Argument(float, 0.2, "optimizer.weight_decay"),
    "beta1": Argument(float, 0.9, "optimizer.beta1"),
    "beta2": Argument(float, 0.95, "optimizer.beta2"),
    "lr_decay_style": Argument(str, "cosine", "lr_scheduler.decay_type"),
    "lr_decay_iters": Argument(int, None, "lr_scheduler.total_steps"),
    "min_lr": Argument(float, 1e-5, "lr_scheduler.min_lr"),
    "warmup": Argument(float, 0.0032, "lr_scheduler.warmup_ratio"),
    "logging_freq": Argument(int, 1, "metrics.log_freq"),
    # What follows needs more than a new name; see `_Translation`.
    "epochs": Argument(int),
    "plateau": Argument(float, 0.0),
    "validation_freq": Argument(int),
    "validation_batches": Argument(int, 10),
    "val_batch_size": Argument(int, 4),
    "checkpoint_dir": Argument(str),
    "checkpoint_freq": Argument(int, 1000),
    "resume_from_checkpoint": Argument(str),
    "bf16": Argument(int, 1),
    "activation_checkpointing": Argument(int, 1),
    "offload_activations": Argument(int, 0),
    "sharding_strategy": Argument(str, "full"),
    "cpu_offload": Argument(int, 0),
    "tensorboard_dir": Argument(str),
    "dataset": Argument(str, "c4"),
    "tokenizer": Argument(str),
    "model_type": Argument(str),
    "vocab_size": Argument(int, 50432),
    "hidden_width": Argument(int, 768),
    "num_layers": Argument(int, 12),
    "num_heads": Argument(int, 12),
    "num_key_value_heads": Argument(int),
    "intermediate_size": Argument(int, 11008),
    # These have nothing behind them here.
    "dataset_config_name": Argument(str, reason="give the folder of that part as training.dataset_path"),
    "same_seed": Argument(int, reason="the weights depend on training.seed alone, on any number of ranks"),
    "limit_all_gathers": Argument(int, reason=_FSDP1),
    "activation_loading_horizon": Argument(int, reason=_FSDP1),
    "resid_pdrop": Argument(float, reason=_NO_DROPOUT),
    "embd_pdrop": Argument(float, reason=_NO_DROPOUT),
    "attn_pdrop": Argument(float, reason=_NO_DROPOUT),
    "summary_first_pdrop": Argument(float, reason=_NO_DROPOUT),
    "initializer_range": Argument(float, reason="the deviation of the initial weights is fixed"),
    "rotary_pct": Argument(float, reason=_OTHER_MODEL),
    "rotary_emb_base": Argument(float, reason=_OTHER_MODEL),
}

_OTHER_NAMES = {"max_training_steps": "max_steps"}
_MODELS = {"llama_v2": ("llama2", "7B"), "llama_v3": ("llama3", "8B")}
_WIDTHS = {
    "hidden_width": "dim",
    "num_layers": "n_layers",
    "num_heads": "n_heads",
    "num_key_value_heads": "n_kv_heads",
    "intermediate_size": "ffn_dim",
}


def migrate_arguments(text: str) -> Migration:
    """The TOML of a command line of the AWS FSDP samples: its arguments, as in a shell, over any number of lines.

    Raises ConfigError for words that make no arguments, and for what their values mean here if that is wrong.
    """
    translation = _Translation(_parse(text))
    translation.run()
    new = translation.text()
    config, problems = read_text(new, Path("migrated.toml"))
    problems += contradictions(config)
    if problems:
        raise ConfigError(problems)
    return Migration(new, tuple(translation.changes))


def _parse(text: str) -> dict[str, Any]:
    try:
        words = shlex.split(text.replace("\\\n", " "), comments=True)
    except ValueError as error:
        raise ConfigError([Problem("--aws-fsdp", "", f"cannot be read as a shell would: {error}")]) from None
    given: dict[str, Any] = {}
    problems: list[Problem] = []
    position = 0
    while position < len(words):
        word = words[position]
        position += 1
        if not word.startswith("--"):
            problems.append(Problem("--aws-fsdp", "", f"unexpected word {quote(word)}", "give --name=value ..."))
            continue
        name, equals, value = word[2:].partition("=")
        if not equals and position < len(words) and not words[position].startswith("--"):
            value = words[position]
            position += 1
        name = _OTHER_NAMES.get(name, name)
        kind = ARGUMENTS[name].kind if name in ARGUMENTS else str
        try:
            given[name] = kind(value)
        except ValueError:
            expected = "an integer" if kind is int else "a number"
            problems.append(Problem("--aws-fsdp", f"--{name}", f"expected {expected}, got {quote(value)}"))
    if problems:
        raise ConfigError(problems)
    return given


@dataclass
class _Translation:
    """One command line on its way into keys."""

    given: dict[str, Any]
    values: dict[str, tuple[Any, str]] = field(default_factory=dict)
    remarks: dict[str, list[str]] = field(default_factory=dict)
    changes: list[Change] = field(default_factory=list)

    def get(self, name: str) -> Any:
        return self.given.get(name, ARGUMENTS[name].default)

    def set(self, key: str, value: Any, *names: str) -> None:
        """Give a key its value; names: the arguments that say so, of which some may be at their defaults."""
        said = [f"--{name}" for name in names if name in self.given]
        if said or value != keys()[".".join(key.split(".")[:2])].default:
            self.values[key] = (value, ", ".join(said) or "default of the AWS FSDP samples")
            text = f"{key} = {quote(value)}"
            self.changes.append(
                Change("rewritten", _WHERE, f"{', '.join(said)} -> {text}")
                if said
                else Change("written out", _WHERE, f"{text}, the default there")
            )

    def leave(self, section: str, names: Iterable[str], reason: str) -> None:
        for name in names:
            if name in self.given:
                text = f"--{name}={self.given[name]}"
                self.remarks.setdefault(section, []).append(f"# no equivalent: {reason}\n# {text}")
                self.changes.append(Change("no equivalent", _WHERE, f"{text}: no equivalent: {reason}"))

    def run(self) -> None:
        self._model()
        self._training()
        self._schedule()
        self._data()
        self._checkpoints()
        for name, argument in ARGUMENTS.items():
            if argument.reason:
                self.leave(
                    "model" if argument.reason in (_NO_DROPOUT, _OTHER_MODEL) else "job", [name], argument.reason
                )
        self.leave("job", [name for name in self.given if name not in ARGUMENTS], "unknown here")

    def _model(self) -> None:
        model_type = self.get("model_type")
        if model_type is not None and model_type not in _MODELS:
            self.leave(
                "model", ["model_type", "vocab_size", *_WIDTHS], f"only {' and '.join(_MODELS)} are Llama models"
            )
            return
        if model_type is None and not any(name in self.given for name in [*_WIDTHS, "vocab_size"]):
            return
        family, flavor = _MODELS[model_type or "llama_v2"]
        self.set("model.name", family, "model_type")
        self.values["model.flavor"] = (flavor, "all its widths are replaced below")
        self.set("model.vocab_size", self.get("vocab_size"), "vocab_size")
        for name, field_ in _WIDTHS.items():
            value = self.get("num_heads") if self.get(name) is None else self.get(name)
            self.set(f"model.overrides.{field_}", value, name)

    def _training(self) -> None:
        for name, argument in ARGUMENTS.items():
            if argument.key and name not in ("max_steps", "lr_decay_iters"):
                self.set(argument.key, self.get(name), name)
        if "epochs" in self.given and "max_steps" not in self.given:
            self.set("training.epochs", self.given["epochs"], "epochs")
        else:
            self.set("training.steps", self.get("max_steps"), "max_steps")
            self.leave("training", ["epochs"], "training.steps and epochs exclude each other; the steps end the run")
        precision = "bfloat16" if self.get("bf16") else "float32"
        self.set("training.mixed_precision_param", precision, "bf16")
        self.set("training.mixed_precision_reduce", precision, "bf16")
        self.set("training.enable_cpu_offload", self.get("cpu_offload") > 0, "cpu_offload")
        mode = "full" if self.get("activation_checkpointing") > 0 else "none"
        self.set("activation_checkpoint.mode", mode, "activation_checkpointing")
        self.set("activation_checkpoint.offload", self.get("offload_activations") > 0, "offload_activations")
        if self.get("sharding_strategy") == "hybrid":
            reason = "set training.data_parallel_replicate_degree to the number of machines"
            self.leave("training", ["sharding_strategy"], reason)
        else:
            self.set("training.data_parallel_shard_degree", -1, "sharding_strategy")

    def _schedule(self) -> None:
        self.values["lr_scheduler.style"] = ("fsdp", "their formulas")
        self.values["metrics.log_style"] = ("fsdp", "their step line")
        if self.get("lr_decay_iters") is not None:
            self.set("lr_scheduler.total_steps", self.get("lr_decay_iters"), "lr_decay_iters")
        if self.get("lr_decay_style") == "plateau":
            self.set("lr_scheduler.plateau_ratio", self.get("plateau"), "plateau", "lr_decay_style")
        else:
            self.leave("lr_scheduler", ["plateau"], 'read with lr_decay_style = "plateau" only')

    def _data(self) -> None:
        dataset = self.get("dataset")
        if dataset in ("c4", "allenai/c4"):
            self.set("training.dataset", "c4", "dataset")
        elif os.path.exists(dataset) or dataset.startswith((".", "/", "~")):
            self.set("training.dataset_path", dataset, "dataset")
        else:
            self.leave("training", ["dataset"], "give a local copy as training.dataset_path")
        tokenizer = self.get("tokenizer")
        if tokenizer is not None and (os.path.exists(tokenizer) or tokenizer.startswith((".", "/", "~"))):
            self.set("model.tokenizer_path", tokenizer, "tokenizer")
        else:
            self.leave("model", ["tokenizer"], "give the tokenizer's file as model.tokenizer_path")
        if self.get("validation_freq") is not None:
            self.values["validation.enable"] = (True, "--validation_freq")
            self.set("validation.freq", self.get("validation_freq"), "validation_freq")
            self.set("validation.steps", self.get("validation_batches"), "validation_batches")
            self.set("validation.batch_size", self.get("val_batch_size"), "val_batch_size")
        else:
            self.leave("validation", ["validation_batches", "val_batch_size"], "read with --validation_freq only")
        if self.get("tensorboard_dir") is not None:
            self.values["metrics.enable_tensorboard"] = (True, "--tensorboard_dir")
            self.set("metrics.save_tb_folder", self.given["tensorboard_dir"], "tensorboard_dir")

    def _checkpoints(self) -> None:
        folder, resumed = self.get("checkpoint_dir"), self.get("resume_from_checkpoint")
        if folder is None and resumed is None:
            self.leave("checkpoint", ["checkpoint_freq"], "read with --checkpoint_dir only")
            return
        self.values["checkpoint.enable_checkpoint"] = (True, "with the newest good one resumed by itself")
        used = "checkpoint_dir" if folder is not None else "resume_from_checkpoint"
        self.set("checkpoint.folder", folder if folder is not None else resumed, used)
        self.set("checkpoint.interval", self.get("checkpoint_freq"), "checkpoint_freq")
        if folder is not None and resumed is not None:
            same = os.path.normpath(folder) == os.path.normpath(resumed)
            reason = "checkpoint.folder is resumed by itself" if same else "a run resumes from where it saves"
            self.leave("checkpoint", ["resume_from_checkpoint"], reason)

    def text(self) -> str:
        """The TOML file."""
        lines = ["# From a command line of the AWS FSDP samples. Relative folders are below job.dump_folder.", ""]
        for section in dict.fromkeys(key.section for key in keys().values()):
            body = [
                f"{_name(key)} = {quote(value)}  # {why}"
                for key, (value, why) in sorted(self.values.items(), key=lambda pair: _place(pair[0]))
                if key.partition(".")[0] == section
            ]
            body += self.remarks.get(section, [])
            if body:
                lines += [f"[{section}]", *body, ""]
        return "\n".join(lines)


def _name(key: str) -> str:
    return ".".join(quote_key(part) for part in key.split(".")[1:])


def _place(key: str) -> int:
    return list(keys()).index(".".join(key.split(".")[:2]))
