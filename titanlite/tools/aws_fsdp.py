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

#: Argument → its default there (or its type, where it has none), and the key here where the value is the same.
ARGUMENTS: dict[str, tuple[Any, str]] = {
    "train_batch_size": (2, "training.batch_size"),
    "max_context_width": (2048, "training.seq_len"),
    "seed": (12345, "training.seed"),
    "grad_clip": (1.0, "training.max_norm"),
    "lr": (1e-4, "optimizer.lr"),
    "weight_decay": (0.2, "optimizer.weight_decay"),
    "beta1": (0.9, "optimizer.beta1"),
    "beta2": (0.95, "optimizer.beta2"),
    "lr_decay_style": ("cosine", "lr_scheduler.decay_type"),
    "min_lr": (1e-5, "lr_scheduler.min_lr"),
    "warmup": (0.0032, "lr_scheduler.warmup_ratio"),
    "logging_freq": (1, "metrics.log_freq"),
    **{"max_steps": (5000, ""), "epochs": (int, ""), "lr_decay_iters": (int, ""), "plateau": (0.0, "")},
    **{"validation_freq": (int, ""), "validation_batches": (10, ""), "val_batch_size": (4, "")},
    **{"checkpoint_dir": (str, ""), "checkpoint_freq": (1000, ""), "resume_from_checkpoint": (str, "")},
    **{"bf16": (1, ""), "activation_checkpointing": (1, ""), "offload_activations": (0, ""), "cpu_offload": (0, "")},
    **{"sharding_strategy": ("full", ""), "tensorboard_dir": (str, ""), "dataset": ("c4", ""), "tokenizer": (str, "")},
    **{"model_type": (str, ""), "vocab_size": (50432, ""), "hidden_width": (768, ""), "num_layers": (12, "")},
    **{"num_heads": (12, ""), "num_key_value_heads": (int, ""), "intermediate_size": (11008, "")},
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
#: (section, reason) → arguments without a counterpart here.
_WITHOUT = {
    ("job", "give the folder of that part as training.dataset_path"): ["dataset_config_name"],
    ("job", "the weights depend on training.seed alone, on any number of ranks"): ["same_seed"],
    ("job", "a setting of the first FSDP; the second does it by itself"): [
        "limit_all_gathers",
        "activation_loading_horizon",
    ],
    ("model", "Llama models have no dropout"): ["resid_pdrop", "embd_pdrop", "attn_pdrop", "summary_first_pdrop"],
    ("model", "the deviation of the initial weights is fixed"): ["initializer_range"],
    ("model", "only other model types there read it"): ["rotary_pct", "rotary_emb_base"],
}


def migrate_arguments(text: str) -> Migration:
    """Return the TOML of a command line of the AWS FSDP samples: its arguments, as in a shell, on one or more lines.

    Raises ConfigError for words that make no arguments, and for values that are wrong here.
    """
    translation = _Translation(_parse(text))
    translation.run()
    new = translation.text()
    config, problems = read_text(new, Path("migrated.toml"))
    if problems := problems or contradictions(config):
        raise ConfigError(problems)
    return Migration(new, tuple(translation.changes))


def _parse(text: str) -> dict[str, Any]:
    """Return the arguments that are given, each of its own type."""
    try:
        words = shlex.split(text.replace("\\\n", " "), comments=True)
    except ValueError as error:
        raise ConfigError([_problem("", f"cannot be read as a shell would: {error}")]) from None
    given: dict[str, Any] = {}
    problems: list[Problem] = []
    while words:
        word = words.pop(0)
        if not word.startswith("--"):
            problems.append(_problem("", f"unexpected word {quote(word)}", "give --name=value ..."))
            continue
        name, equals, value = word[2:].partition("=")
        if not equals and words and not words[0].startswith("--"):
            value = words.pop(0)
        name = _OTHER_NAMES.get(name, name)
        default = ARGUMENTS.get(name, ("", ""))[0]
        kind = default if isinstance(default, type) else type(default)
        try:
            given[name] = kind(value)
        except ValueError:
            expected = "an integer" if kind is int else "a number"
            problems.append(_problem(f"--{name}", f"expected {expected}, got {quote(value)}"))
    if problems:
        raise ConfigError(problems)
    return given


def _problem(key: str, message: str, hint: str = "") -> Problem:
    return Problem("--aws-fsdp", key, message, hint, code="bad-flag")


def _is_path(text: str) -> bool:
    return os.path.exists(text) or text.startswith((".", "/", "~"))


class _Translation:
    """One command line on its way into keys."""

    def __init__(self, given: dict[str, Any]) -> None:
        self.given = given
        #: Key → value and comment.
        self.values: dict[str, tuple[Any, str]] = {}
        #: Section → comments about arguments without a counterpart.
        self.remarks: dict[str, list[str]] = {}
        self.changes: list[Change] = []

    def get(self, name: str) -> Any:
        default = ARGUMENTS[name][0]
        return self.given.get(name, None if isinstance(default, type) else default)

    def set(self, key: str, value: Any, *names: str) -> None:
        """Give a key its value; names: the arguments that decide it, of which some may be at their defaults."""
        said = ", ".join(f"--{name}" for name in names if name in self.given)
        if said or value != keys()[".".join(key.split(".")[:2])].default:
            self.values[key] = (value, said or "default of the AWS FSDP samples")
            text = f"{key} = {quote(value)}"
            change = ("rewritten", f"{said} -> {text}") if said else ("written out", f"{text}, the default there")
            self.changes.append(Change(change[0], "command line", change[1]))  # type: ignore[arg-type]

    def leave(self, section: str, reason: str, *names: str) -> None:
        """Note arguments that have no counterpart here."""
        for name in names:
            if name in self.given:
                text = f"--{name}={self.given[name]}"
                self.remarks.setdefault(section, []).append(f"# no equivalent: {reason}\n# {text}")
                self.changes.append(Change("no equivalent", "command line", f"{text}: no equivalent: {reason}"))

    def run(self) -> None:
        """Translate all arguments."""
        get, given = self.get, self.given
        self._model()
        for name, (_, key) in ARGUMENTS.items():
            if key:
                self.set(key, get(name), name)
        if "epochs" in given and "max_steps" not in given:
            self.set("training.epochs", get("epochs"), "epochs")
        else:
            self.set("training.steps", get("max_steps"), "max_steps")
            self.leave("training", "training.steps and epochs exclude each other; the steps end the run", "epochs")
        for part in ("param", "reduce"):
            self.set(f"training.mixed_precision_{part}", "bfloat16" if get("bf16") else "float32", "bf16")
        self.set("training.enable_cpu_offload", get("cpu_offload") > 0, "cpu_offload")
        mode = "full" if get("activation_checkpointing") > 0 else "none"
        self.set("activation_checkpoint.mode", mode, "activation_checkpointing")
        self.set("activation_checkpoint.offload", get("offload_activations") > 0, "offload_activations")
        if get("sharding_strategy") == "hybrid":
            reason = "set training.data_parallel_replicate_degree to the number of machines"
            self.leave("training", reason, "sharding_strategy")
        else:
            self.set("training.data_parallel_shard_degree", -1, "sharding_strategy")
        self.values["lr_scheduler.style"] = ("fsdp", "their formulas")
        self.values["metrics.log_style"] = ("fsdp", "their step line")
        self.set("lr_scheduler.total_steps", get("lr_decay_iters"), "lr_decay_iters")
        if get("lr_decay_style") == "plateau":
            self.set("lr_scheduler.plateau_ratio", get("plateau"), "plateau", "lr_decay_style")
        else:
            self.leave("lr_scheduler", 'read with lr_decay_style = "plateau" only', "plateau")
        self._data()
        self._checkpoints()
        for (section, reason), names in _WITHOUT.items():
            self.leave(section, reason, *names)
        known = [*ARGUMENTS, *(name for names in _WITHOUT.values() for name in names)]
        self.leave("job", "unknown here", *(name for name in given if name not in known))

    def _model(self) -> None:
        kind = self.get("model_type")
        if kind is not None and kind not in _MODELS:
            self.leave("model", f"only {' and '.join(_MODELS)} are Llama models", "model_type", "vocab_size", *_WIDTHS)
        elif kind is not None or any(name in self.given for name in (*_WIDTHS, "vocab_size")):
            family, flavor = _MODELS[kind or "llama_v2"]
            self.set("model.name", family, "model_type")
            self.values["model.flavor"] = (flavor, "all its widths are replaced below")
            self.set("model.vocab_size", self.get("vocab_size"), "vocab_size")
            for name, width in _WIDTHS.items():
                value = self.get("num_heads") if self.get(name) is None else self.get(name)
                self.set(f"model.overrides.{width}", value, name)

    def _data(self) -> None:
        dataset, tokenizer = self.get("dataset"), self.get("tokenizer")
        if dataset in ("c4", "allenai/c4"):
            self.set("training.dataset", "c4", "dataset")
        elif _is_path(dataset):
            self.set("training.dataset_path", dataset, "dataset")
        else:
            self.leave("training", "give a local copy as training.dataset_path", "dataset")
        if tokenizer is not None and _is_path(tokenizer):
            self.set("model.tokenizer_path", tokenizer, "tokenizer")
        else:
            self.leave("model", "give the tokenizer's file as model.tokenizer_path", "tokenizer")
        if self.get("validation_freq") is not None:
            self.values["validation.enable"] = (True, "--validation_freq")
            self.set("validation.freq", self.get("validation_freq"), "validation_freq")
            self.set("validation.steps", self.get("validation_batches"), "validation_batches")
            self.set("validation.batch_size", self.get("val_batch_size"), "val_batch_size")
        else:
            self.leave("validation", "read with --validation_freq only", "validation_batches", "val_batch_size")
        if self.get("tensorboard_dir") is not None:
            self.values["metrics.enable_tensorboard"] = (True, "--tensorboard_dir")
            self.set("metrics.save_tb_folder", self.get("tensorboard_dir"), "tensorboard_dir")

    def _checkpoints(self) -> None:
        folder, resumed = self.get("checkpoint_dir"), self.get("resume_from_checkpoint")
        if folder is None and resumed is None:
            self.leave("checkpoint", "read with --checkpoint_dir only", "checkpoint_freq")
            return
        self.values["checkpoint.enable_checkpoint"] = (True, "with the newest good one resumed by itself")
        used = "resume_from_checkpoint" if folder is None else "checkpoint_dir"
        self.set("checkpoint.folder", self.get(used), used)
        self.set("checkpoint.interval", self.get("checkpoint_freq"), "checkpoint_freq")
        if folder is not None and resumed is not None:
            same = os.path.normpath(folder) == os.path.normpath(resumed)
            reason = "checkpoint.folder is resumed by itself" if same else "a run resumes from where it saves"
            self.leave("checkpoint", reason, "resume_from_checkpoint")

    def text(self) -> str:
        """Return the TOML file."""
        lines = ["# From a command line of the AWS FSDP samples. Relative folders are below job.dump_folder.", ""]
        order = list(keys())
        ordered = sorted(self.values, key=lambda key: order.index(".".join(key.split(".")[:2])))
        for section in dict.fromkeys(key.partition(".")[0] for key in order):
            body = []
            for key in (key for key in ordered if key.partition(".")[0] == section):
                value, why = self.values[key]
                body.append(f"{'.'.join(map(quote_key, key.split('.')[1:]))} = {quote(value)}  # {why}")
            if body := body + self.remarks.get(section, []):
                lines += [f"[{section}]", *body, ""]
        return "\n".join(lines)
