"""Print the arguments of the AWS FSDP samples' train.py as a config of titanlite.

    python examples/from_aws_fsdp.py llama3_1_8b-training.sbatch > 8b.toml
    python examples/from_aws_fsdp.py --model_type=mixtral --hidden_width=4096 ... > mixtral.toml

The file has the array TRAINING_ARGS, or nothing but arguments. Arguments of the command line
replace those of the file. docs/from-aws-fsdp.md has the table.
"""

from __future__ import annotations

import argparse
import json
import re
import shlex
import sys
from pathlib import Path
from typing import Any

#: Argument → its default in train.py, and the key here.
KEYS: dict[str, tuple[Any, str]] = {
    "hidden_width": (768, "model.overrides.dim"),
    "num_layers": (12, "model.overrides.n_layers"),
    "num_heads": (12, "model.overrides.n_heads"),
    "num_key_value_heads": (None, "model.overrides.n_kv_heads"),
    "intermediate_size": (11008, "model.overrides.ffn_dim"),
    "vocab_size": (50432, "model.vocab_size"),
    "tokenizer": ("EleutherAI/gpt-neox-20b", "model.tokenizer_path"),
    "dataset": ("allenai/c4", "training.dataset"),
    "dataset_config_name": ("en", "data.subset"),
    "dataset_path": (None, "training.dataset_path"),
    "train_batch_size": (2, "training.batch_size"),
    "max_steps": (5000, "training.steps"),
    "seed": (12345, "training.seed"),
    "grad_clip": (1.0, "training.max_norm"),
    "bf16": (1, "training.mixed_precision_param"),
    "cpu_offload": (0, "training.enable_cpu_offload"),
    "sharding_strategy": ("full", "training.data_parallel_replicate_degree"),
    "lr": (1e-4, "optimizer.lr"),
    "weight_decay": (0.2, "optimizer.weight_decay"),
    "beta1": (0.9, "optimizer.beta1"),
    "beta2": (0.95, "optimizer.beta2"),
    "lr_decay_style": ("cosine", "lr_scheduler.decay_type"),
    "lr_decay_iters": (None, "lr_scheduler.total_steps"),
    "min_lr": (1e-5, "lr_scheduler.min_lr"),
    "warmup": (0.0032, "lr_scheduler.warmup_ratio"),
    "plateau": (0.0, "lr_scheduler.plateau_ratio"),
    "activation_checkpointing": (1, "activation_checkpoint.mode"),
    "offload_activations": (0, "activation_checkpoint.offload"),
    "validation_freq": (None, "validation.freq"),
    "validation_batches": (10, "validation.steps"),
    "val_batch_size": (4, "validation.batch_size"),
    "checkpoint_dir": (None, "checkpoint.folder"),
    "checkpoint_freq": (1000, "checkpoint.interval"),
    "logging_freq": (1, "metrics.log_freq"),
    "tensorboard_dir": (None, "metrics.save_tb_folder"),
}
#: Argument → why no key follows from it.
WITHOUT_KEY = {
    "max_context_width": "their loader cuts sequences of 4,096 tokens, whatever this says",
    "epochs": "the steps end the run",
    "resume_from_checkpoint": "a run resumes from its own newest checkpoint",
    "initializer_range": "titanlite draws initial weights by its own rule",
    "limit_all_gathers": "FSDP2 has no such limit",
    **dict.fromkeys(("rotary_pct", "rotary_emb_base"), "GPT-NeoX alone reads it"),
    **dict.fromkeys(
        ("resid_pdrop", "embd_pdrop", "attn_pdrop", "summary_first_pdrop"),
        "their models have no dropout either",
    ),
    **dict.fromkeys(
        ("same_seed", "activation_loading_horizon", "train_split", "val_split"),
        "their train.py does not read it",
    ),
}
SIZES = ("hidden_width", "num_layers", "num_heads", "num_key_value_heads", "intermediate_size")
#: Shipped file → model_type and sizes. The first of a type is the base of other sizes.
MODELS = {
    "llama2_7b": ("llama_v2", 4096, 32, 32, 32, 11008),
    "llama2_13b": ("llama_v2", 5120, 40, 40, 40, 13824),
    "llama2_70b": ("llama_v2", 8192, 80, 64, 8, 28672),
    "llama3_1_8b": ("llama_v3", 4096, 32, 32, 8, 14336),
    "llama3_1_70b": ("llama_v3", 8192, 80, 64, 8, 28672),
    "llama3_2_1b": ("llama_v3", 2048, 16, 32, 8, 8192),
    "llama3_2_3b": ("llama_v3", 3072, 28, 24, 8, 8192),
    "mathstral_7b": ("mistral", 4096, 32, 32, 8, 14336),
    "mixtral_8x7b": ("mixtral", 4096, 32, 32, 8, 14336),
}
#: Section → the key that switches it off, and the argument whose absence does.
SWITCHES = {
    "validation": ("validation.enable", "validation_freq"),
    "checkpoint": ("checkpoint.enable_checkpoint", "checkpoint_dir"),
    "metrics": ("metrics.enable_tensorboard", "tensorboard_dir"),
}
#: Argument → what its value is here; others are taken as they are.
WORDS = {
    "bf16": lambda on: "bfloat16" if on else "float32",
    "activation_checkpointing": lambda on: "full" if on else "none",
    "cpu_offload": bool,
    "offload_activations": bool,
}


def words_of(text: str) -> list[str]:
    """Return the arguments in a file: those of TRAINING_ARGS=(…), else all."""
    array = re.search(r"TRAINING_ARGS=\((.*?)\)\s*$", text, re.DOTALL | re.MULTILINE)
    return shlex.split(array[1] if array else text, comments=True)


def parser() -> argparse.ArgumentParser:
    """Return the parser of train.py; it refuses unknown arguments, which train.py ignores."""
    usage = "%(prog)s [FILE] [--ARGUMENT=VALUE ...]"
    found = argparse.ArgumentParser(usage=usage, allow_abbrev=False)
    found.add_argument("file", nargs="?", type=Path, help="shell file with TRAINING_ARGS")
    found.add_argument("--model_type", default="gpt_neox")
    for name, (default, key) in KEYS.items():
        kind = type(default) if default is not None else str
        if name in ("num_key_value_heads", "lr_decay_iters", "validation_freq"):
            kind = int
        names = [f"--{name}", *(["--max_training_steps"] if name == "max_steps" else [])]
        found.add_argument(*names, type=kind, help=key)
    for name, why in WITHOUT_KEY.items():
        found.add_argument(f"--{name}", help=f"no key: {why}")
    return found


def model_file(kind: str, sizes: dict[str, Any]) -> str:
    """Return the shipped file of a model's type, width and depth; exits for another type."""
    files = [file for file, model in MODELS.items() if model[0] == kind]
    if not files:
        known = ", ".join(dict.fromkeys(model[0] for model in MODELS.values()))
        sys.exit(f"--model_type={kind}: titanlite has {known}")
    shape = (sizes["hidden_width"], sizes["num_layers"])
    return next((file for file in files if MODELS[file][1:3] == shape), files[0])


def tokenizer(name: str) -> tuple[str, list[str]]:
    """Return where the tokenizer lies, and a note how it comes there; exits for neither."""
    if Path(name).exists():
        return name, []
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", name):
        sys.exit(f"--tokenizer={name}: neither a path that exists nor OWNER/NAME on the hub")
    folder = f"assets/{name.partition('/')[2]}"
    return folder, [f'hf download {name} --include "tokenizer*" --local-dir {folder}']


def machines(script: str) -> dict[str, int]:
    """Return the keys of section [launch] that a batch script tells."""
    patterns = {
        "launch.nodes": r"^#SBATCH --nodes[= ](\d+)",
        "launch.gpus_per_node": r"^(?:export )?GPUS_PER_NODE=(\d+)",
    }
    matches = {key: re.search(pattern, script, re.MULTILINE) for key, pattern in patterns.items()}
    return {key: int(match[1]) for key, match in matches.items() if match}


def keys_of(given: dict[str, Any], script: str) -> tuple[dict[str, Any], list[str]]:
    """Return keys with their values, and notes on what has none.

    given: the arguments; None is the default.
    """
    notes = [f"--{name}: {why}" for name, why in WITHOUT_KEY.items() if given[name] is not None]
    values = {name: default for name, (default, _) in KEYS.items()}
    values |= {name: given[name] for name in KEYS if given[name] is not None}
    values["num_key_value_heads"] = values["num_key_value_heads"] or values["num_heads"]
    file = model_file(given["model_type"], values)
    same = [
        name for name, size in zip(SIZES, MODELS[file][1:], strict=True) if values[name] == size
    ]
    keys: dict[str, Any] = {"job.extends": [f"{file}.toml", "platforms/aws_fsdp.toml"]}
    keys |= machines(script)
    if values["sharding_strategy"] == "hybrid":
        if "launch.nodes" not in keys:
            sys.exit("--sharding_strategy=hybrid: no line '#SBATCH --nodes=N' tells the machines")
        values["sharding_strategy"] = keys["launch.nodes"]
    else:
        same.append("sharding_strategy")
    values["tokenizer"], download = tokenizer(values["tokenizer"])
    if values["dataset"] == "allenai/c4":
        values["dataset"] = "c4"
        same.append("dataset_config_name")
    if values["lr_decay_style"] != "plateau":
        same.append("plateau")
    for section, (switch, name) in SWITCHES.items():
        keys[switch] = values[name] is not None
        if section != "metrics" and not keys[switch]:
            same += [other for other, (_, key) in KEYS.items() if key.startswith(f"{section}.")]
    for name, value in values.items():
        if value is not None and name not in same:
            keys[KEYS[name][1]] = WORDS.get(name, lambda word: word)(value)
    if keys["validation.enable"] and values["dataset_path"]:
        keys |= {"validation.dataset_path": values["dataset_path"]}
        keys |= {"validation.split": "validation"}
    elif keys["validation.enable"] and values["dataset"] != "c4":
        keys |= {"validation.dataset": values["dataset"], "validation.split": "validation"}
    return keys, notes + download


def toml(keys: dict[str, Any], notes: list[str]) -> str:
    """Return the file: notes as comments, then the sections."""
    sections: dict[str, list[str]] = {}
    for key, value in keys.items():
        section, _, name = key.rpartition(".")
        # A string, list or number of JSON is one of TOML.
        sections.setdefault(section, []).append(f"{name} = {json.dumps(value)}\n")
    blocks = ["".join(f"# {note}\n" for note in notes)] if notes else []
    blocks += [f"[{section}]\n{''.join(lines)}" for section, lines in sections.items()]
    return "\n".join(blocks)


def main(words: list[str]) -> str:
    """Return the TOML of a command line."""
    known = parser()
    given = known.parse_args(words)
    script = given.file.read_text(encoding="utf-8") if given.file else ""
    if script:
        given = known.parse_args([*words_of(script), *words])
    return toml(*keys_of(vars(given), script))


if __name__ == "__main__":
    print(main(sys.argv[1:]), end="")
