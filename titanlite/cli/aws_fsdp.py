"""The command line of the AWS FSDP samples (`train.py --max_steps=… --lr=…`) as a TOML file.

Their defaults are written out where they differ from titanlite's, so that the file means what the
command meant.
"""

from __future__ import annotations

import os
import shlex
from pathlib import Path
from typing import Any

from titanlite.cli.migrate import Change, Kind, Migration
from titanlite.config.errors import ConfigError, Problem
from titanlite.config.keys import keys
from titanlite.config.load import read_text
from titanlite.config.toml import quote
from titanlite.config.trust import Origin
from titanlite.resolve.load import check_alone

_MODELS = {"llama_v2": ("llama2", "7B"), "llama_v3": ("llama3", "8B")}
_OTHER_MODEL = f"only {' and '.join(_MODELS)} are Llama models"
_NO_VALIDATION = "read with --validation_freq only"
#: Argument → its default there (or its type if it has none). The key here, or the reason why it may
#: have none. `_Translation` translates some of those with a reason.
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
    "lr_decay_iters": (int, "lr_scheduler.total_steps"),
    "min_lr": (1e-5, "lr_scheduler.min_lr"),
    "warmup": (0.0032, "lr_scheduler.warmup_ratio"),
    "logging_freq": (1, "metrics.log_freq"),
    "bf16": (1, "training.mixed_precision_param"),
    "activation_checkpointing": (1, "activation_checkpoint.mode"),
    "offload_activations": (0, "activation_checkpoint.offload"),
    "cpu_offload": (0, "training.enable_cpu_offload"),
    "max_steps": (5000, ""),
    "epochs": (int, "training.steps and epochs exclude each other; the steps end the run"),
    "plateau": (0.0, 'read with lr_decay_style = "plateau" only'),
    "sharding_strategy": (
        "full",
        "set training.data_parallel_replicate_degree to the number of machines",
    ),
    "dataset": ("c4", "give a local copy as training.dataset_path"),
    "tokenizer": (str, "give the tokenizer's file as model.tokenizer_path"),
    "model_type": (str, _OTHER_MODEL),
    "vocab_size": (50432, _OTHER_MODEL),
    "hidden_width": (768, _OTHER_MODEL),
    "num_layers": (12, _OTHER_MODEL),
    "num_heads": (12, _OTHER_MODEL),
    "num_key_value_heads": (int, _OTHER_MODEL),
    "intermediate_size": (11008, _OTHER_MODEL),
    "validation_freq": (int, ""),
    "validation_batches": (10, _NO_VALIDATION),
    "val_batch_size": (4, _NO_VALIDATION),
    "checkpoint_dir": (str, ""),
    "checkpoint_freq": (1000, "read with --checkpoint_dir only"),
    "resume_from_checkpoint": (str, "a run resumes by itself, from the folder where it saves"),
    "tensorboard_dir": (str, ""),
    "dataset_config_name": (str, "give the folder of that part as training.dataset_path"),
    "same_seed": (str, "the weights depend on training.seed alone, on any number of ranks"),
    "initializer_range": (str, "the deviation of the initial weights is fixed"),
    **dict.fromkeys(
        ("limit_all_gathers", "activation_loading_horizon"), (str, "FSDP2 needs no such setting")
    ),
    **dict.fromkeys(
        ("resid_pdrop", "embd_pdrop", "attn_pdrop", "summary_first_pdrop"),
        (str, "no dropout in Llama"),
    ),
    **dict.fromkeys(
        ("rotary_pct", "rotary_emb_base"), (str, "only other model types there read it")
    ),
}
#: Key → its value for a number above 0, and for another one.
_SWITCHES = {
    "training.mixed_precision_param": ("bfloat16", "float32"),
    "activation_checkpoint.mode": ("full", "none"),
    "activation_checkpoint.offload": (True, False),
    "training.enable_cpu_offload": (True, False),
}
#: Key of `model.overrides` → argument.
_WIDTHS = {
    "dim": "hidden_width",
    "n_layers": "num_layers",
    "n_heads": "num_heads",
    "n_kv_heads": "num_key_value_heads",
    "ffn_dim": "intermediate_size",
}


def migrate_arguments(text: str) -> Migration:
    """Return the TOML of a command line of the AWS FSDP samples.

    The command line is as in a shell, on one or more lines.

    Raises ConfigError for words that make no arguments, and for values that are wrong here.
    """
    translation = _Translation(_parse(text))
    translation.run()
    left = translation.left_out()
    lines = [
        "# From a command line of the AWS FSDP samples. Relative folders are below job.dump_folder."
    ]
    lines += [f"# {text}" for text in left]
    changes: list[Change] = []
    section = ""
    for key, (value, why) in translation.in_order():
        first, _, name = key.partition(".")
        if first != section:
            section = first
            lines += ["", f"[{section}]"]
        lines.append(f"{name} = {quote(value)}  # {why}")
        kind: Kind = "rewritten" if why.startswith("--") else "defaults written out"
        changes.append(Change(kind, "command line", f"{key} = {quote(value)}: {why}"))
    changes += [Change("without equivalent", "command line", text) for text in left]
    new = "\n".join([*lines, ""])
    config, problems = read_text(new, Path("migrated.toml"), origin=Origin.OWN)
    check_alone(config, problems)
    return Migration(new, tuple(changes))


def _parse(text: str) -> dict[str, Any]:
    """Return the arguments that are given, each in its type."""

    def wrong(key: str, message: str) -> ConfigError:
        return ConfigError([Problem("bad-flag", key, message, where="--aws-fsdp")])

    try:
        words = shlex.split(text.replace("\\\n", " "), comments=True)
    except ValueError as error:
        raise wrong("", f"cannot be read as a shell would: {error}") from None
    given: dict[str, Any] = {}
    while words:
        word = words.pop(0)
        if not word.startswith("--"):
            raise wrong("", f"unexpected word {quote(word)}; give --name=value ...")
        name, equals, value = word[2:].partition("=")
        if not equals and words and not words[0].startswith("--"):
            value = words.pop(0)
        name = "max_steps" if name == "max_training_steps" else name
        default = ARGUMENTS.get(name, (str, ""))[0]
        kind = default if isinstance(default, type) else type(default)
        try:
            given[name] = kind(value)
        except ValueError:
            expected = "an integer" if kind is int else "a number"
            raise wrong(f"--{name}", f"expected {expected}, got {quote(value)}") from None
    return given


class _Translation:
    """The keys for the arguments of a command line."""

    def __init__(self, given: dict[str, Any]) -> None:
        self.given = given
        self.get: dict[str, Any] = {}
        for name, (default, _) in ARGUMENTS.items():
            self.get[name] = None if isinstance(default, type) else default
        self.get |= given
        #: Key → value and where it is from, for keys unlike titanlite's defaults.
        self.values: dict[str, tuple[Any, str]] = {
            "lr_scheduler.style": ("fsdp", "their formulas"),
            "metrics.log_style": ("aws_fsdp", "their step line"),
        }
        #: Arguments that count.
        self.used: set[str] = set()

    def run(self) -> None:
        """Translate all arguments."""
        self._model()
        self._one_by_one()
        self._training()
        self._text()
        self._folders()

    def in_order(self) -> list[tuple[str, tuple[Any, str]]]:
        """Return keys with values and where these are from, in the order of sections."""
        order = list(keys())
        return sorted(self.values.items(), key=lambda item: order.index(_whole_key(item[0])))

    def left_out(self) -> list[str]:
        """Return a line for each argument that is given and does not count."""
        lines = []
        for name, value in self.given.items():
            if name not in self.used:
                reason = ARGUMENTS[name][1] if name in ARGUMENTS else "unknown here"
                lines.append(f"--{name}={value}: no equivalent: {reason}")
        return lines

    def put(self, key: str, value: Any, *names: str) -> None:
        """Give a key its value.

        names: the arguments that decide it, of which some may be at their defaults.
        """
        self.used.update(names)
        said = ", ".join(f"--{name}" for name in names if name in self.given)
        if said or value != keys()[_whole_key(key)].default:
            self.values[key] = (value, said or "default of the AWS FSDP samples")

    def take(self, key: str, *names: str) -> None:
        """Give a key the value of the first of the arguments that decide it."""
        self.put(key, self.get[names[0]], *names)

    def _model(self) -> None:
        kind = self.get["model_type"]
        has_widths = not self.given.keys().isdisjoint((*_WIDTHS.values(), "vocab_size"))
        if kind is None and has_widths:
            kind = "llama_v2"
        if kind not in _MODELS:
            return
        family, flavor = _MODELS[kind]
        self.put("model.name", family, "model_type")
        self.values["model.flavor"] = (flavor, "all its widths are replaced below")
        self.take("model.vocab_size", "vocab_size")
        for width, name in _WIDTHS.items():
            size = self.get[name]
            # Only the heads of keys and values have no default: each query has its own then.
            if size is None:
                size = self.get["num_heads"]
            self.put(f"model.overrides.{width}", size, name)

    def _one_by_one(self) -> None:
        """Translate arguments whose key takes their value, or is switched by it."""
        for name, (_, key) in ARGUMENTS.items():
            if key in _SWITCHES:
                on, off = _SWITCHES[key]
                self.put(key, on if self.get[name] > 0 else off, name)
            elif key in keys():
                self.take(key, name)

    def _training(self) -> None:
        reduced = "bfloat16" if self.get["bf16"] > 0 else "float32"
        self.put("training.mixed_precision_reduce", reduced, "bf16")
        if "epochs" in self.given and "max_steps" not in self.given:
            self.take("training.epochs", "epochs")
        else:
            self.take("training.steps", "max_steps")
        if self.get["lr_decay_style"] == "plateau":
            self.take("lr_scheduler.plateau_ratio", "plateau", "lr_decay_style")
        if self.get["sharding_strategy"] != "hybrid":
            self.put("training.data_parallel_shard_degree", -1, "sharding_strategy")

    def _text(self) -> None:
        dataset = self.get["dataset"]
        if dataset in ("c4", "allenai/c4"):
            self.put("training.dataset", "c4", "dataset")
        elif _is_path(dataset):
            self.put("training.dataset_path", dataset, "dataset")
        if _is_path(self.get["tokenizer"]):
            self.take("model.tokenizer_path", "tokenizer")
        if self.get["validation_freq"] is not None:
            self.values["validation.enable"] = (True, "--validation_freq")
            self.take("validation.freq", "validation_freq")
            self.take("validation.steps", "validation_batches")
            self.take("validation.batch_size", "val_batch_size")

    def _folders(self) -> None:
        if self.get["tensorboard_dir"] is not None:
            self.values["metrics.enable_tensorboard"] = (True, "--tensorboard_dir")
            self.take("metrics.save_tb_folder", "tensorboard_dir")
        for name in ("checkpoint_dir", "resume_from_checkpoint"):
            if self.get[name] is not None:
                why = "with the newest good one resumed by itself"
                self.values["checkpoint.enable_checkpoint"] = (True, why)
                self.take("checkpoint.folder", name)
                self.take("checkpoint.interval", "checkpoint_freq")
                return


def _whole_key(key: str) -> str:
    """Return the key of an entry of a table, or the key itself."""
    return ".".join(key.split(".")[:2])


def _is_path(text: str | None) -> bool:
    return text is not None and (os.path.exists(text) or text.startswith((".", "/", "~")))
