"""The command line of the AWS FSDP samples (`train.py --max_steps=… --lr=…`) as a TOML file.

Their defaults are written out where they differ from titanlite's, so that the file means what the
command meant.
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
from titanlite.config.toml import quote
from titanlite.config.trust import Origin
from titanlite.tools.commands.migrate import Change, Kind, Migration

_MODELS = {"llama_v2": ("llama2", "7B"), "llama_v3": ("llama3", "8B")}
_OTHER_MODEL = f"only {' and '.join(_MODELS)} are Llama models"
_NO_VALIDATION = "read with --validation_freq only"
#: Argument → its default there (or its type, where it has none); the key here, or the reason why it
#: may have none. `_translate` has those with a reason.
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
    **{"dim": "hidden_width", "n_layers": "num_layers", "n_heads": "num_heads"},
    **{"n_kv_heads": "num_key_value_heads", "ffn_dim": "intermediate_size"},
}


def migrate_arguments(text: str) -> Migration:
    """Return the TOML of a command line of the AWS FSDP samples: its arguments, as in a shell, on
    one or more lines.

    Raises ConfigError for words that make no arguments, and for values that are wrong here.
    """
    values, used = _translate(given := _parse(text))
    unused = {name: value for name, value in given.items() if name not in used}
    left = [
        f"--{n}={v}: no equivalent: {ARGUMENTS.get(n, ('', 'unknown here'))[1]}"
        for n, v in unused.items()
    ]
    lines = [
        "# From a command line of the AWS FSDP samples. Relative folders are below job.dump_folder."
    ]
    lines += [f"# {text}" for text in left]
    changes: list[Change] = []
    order, section = list(keys()), ""
    for key in sorted(values, key=lambda key: order.index(".".join(key.split(".")[:2]))):
        first, _, name = key.partition(".")
        if first != section:
            section = first
            lines += ["", f"[{section}]"]
        value, why = values[key]
        lines.append(f"{name} = {quote(value)}  # {why}")
        kind: Kind = "rewritten" if why.startswith("--") else "defaults written out"
        changes.append(Change(kind, "command line", f"{key} = {quote(value)}: {why}"))
    changes += [Change("without equivalent", "command line", text) for text in left]
    new = "\n".join([*lines, ""])
    config, problems = read_text(new, Path("migrated.toml"), origin=Origin.OWN)
    if problems := problems or contradictions(config):
        raise ConfigError(problems)
    return Migration(new, tuple(changes))


def _parse(text: str) -> dict[str, Any]:
    """Return the arguments that are given, each of its own type."""

    def wrong(key: str, message: str) -> ConfigError:
        return ConfigError([Problem("--aws-fsdp", key, message, code="bad-flag")])

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


def _translate(given: dict[str, Any]) -> tuple[dict[str, tuple[Any, str]], set[str]]:
    """Return key → value and where it is from, for keys unlike titanlite's defaults; and the
    arguments that count.
    """
    values: dict[str, tuple[Any, str]] = {
        "lr_scheduler.style": ("fsdp", "their formulas"),
        "metrics.log_style": ("aws_fsdp", "their step line"),
    }
    used: set[str] = set()
    defaults = {
        name: None if isinstance(default, type) else default
        for name, (default, _) in ARGUMENTS.items()
    }
    get: dict[str, Any] = defaults | given

    def put(key: str, value: Any, *names: str) -> None:
        """Give a key its value.

        names: the arguments that decide it, of which some may be at their defaults.
        """
        used.update(names)
        said = ", ".join(f"--{name}" for name in names if name in given)
        if said or value != keys()[".".join(key.split(".")[:2])].default:
            values[key] = (value, said or "default of the AWS FSDP samples")

    kind = get["model_type"]
    if kind in _MODELS or kind is None and {*_WIDTHS.values(), "vocab_size"} & given.keys():
        family, flavor = _MODELS[kind or "llama_v2"]
        put("model.name", family, "model_type")
        values["model.flavor"] = (flavor, "all its widths are replaced below")
        put("model.vocab_size", get["vocab_size"], "vocab_size")
        for width, name in _WIDTHS.items():
            put(
                f"model.overrides.{width}",
                get["num_heads"] if get[name] is None else get[name],
                name,
            )
    for name, (_, key) in ARGUMENTS.items():
        if key in _SWITCHES:
            put(key, _SWITCHES[key][get[name] <= 0], name)
        elif key in keys():
            put(key, get[name], name)
    put("training.mixed_precision_reduce", "bfloat16" if get["bf16"] > 0 else "float32", "bf16")
    length = "epochs" if "epochs" in given and "max_steps" not in given else "max_steps"
    put(f"training.{length.removeprefix('max_')}", get[length], length)
    if get["lr_decay_style"] == "plateau":
        put("lr_scheduler.plateau_ratio", get["plateau"], "plateau", "lr_decay_style")
    if get["sharding_strategy"] != "hybrid":
        put("training.data_parallel_shard_degree", -1, "sharding_strategy")
    if get["dataset"] in ("c4", "allenai/c4"):
        put("training.dataset", "c4", "dataset")
    elif _is_path(get["dataset"]):
        put("training.dataset_path", get["dataset"], "dataset")
    if _is_path(get["tokenizer"]):
        put("model.tokenizer_path", get["tokenizer"], "tokenizer")
    if get["validation_freq"] is not None:
        values["validation.enable"] = (True, "--validation_freq")
        put("validation.freq", get["validation_freq"], "validation_freq")
        put("validation.steps", get["validation_batches"], "validation_batches")
        put("validation.batch_size", get["val_batch_size"], "val_batch_size")
    if get["tensorboard_dir"] is not None:
        values["metrics.enable_tensorboard"] = (True, "--tensorboard_dir")
        put("metrics.save_tb_folder", get["tensorboard_dir"], "tensorboard_dir")
    if folder := [
        name for name in ("checkpoint_dir", "resume_from_checkpoint") if get[name] is not None
    ]:
        values["checkpoint.enable_checkpoint"] = (
            True,
            "with the newest good one resumed by itself",
        )
        put("checkpoint.folder", get[folder[0]], folder[0])
        put("checkpoint.interval", get["checkpoint_freq"], "checkpoint_freq")
    return values, used


def _is_path(text: str | None) -> bool:
    return text is not None and (os.path.exists(text) or text.startswith((".", "/", "~")))
