"""Adapters in PEFT's files: adapter_config.json and adapter_model.safetensors.

A name there is Hugging Face's of the linear, between a prefix and the matrix: of wq in block 0
`base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from titanlite.checkpoint.errors import CheckpointError
from titanlite.checkpoint.foreign_weights import Part, Slices, Weights
from titanlite.checkpoint.hf import DTYPES, open_safetensors
from titanlite.checkpoint.hf_files import PEFT_CONFIG, PEFT_FILE
from titanlite.checkpoint.hf_save import as_json, new_folder
from titanlite.checkpoint.source_model import read_json
from titanlite.checkpoint.store_paths import AnyPath
from titanlite.features.lora.settings import DOWN, UP, Adapters, names_at_hf
from titanlite.models.hf_names import entry_of
from titanlite.models.spec import ModelSpec, Size
from titanlite.utils import sync

_PREFIX = "base_model.model."
#: Ours → theirs.
_MATRICES = {DOWN: "lora_A.weight", UP: "lora_B.weight"}
#: Entries that decide nothing about what adapters compute, or that the tensors tell too.
_HARMLESS = {
    "auto_mapping",
    "base_model_name_or_path",
    "corda_config",
    "ensure_weight_tying",
    "eva_config",
    "exclude_modules",
    "inference_mode",
    "layers_pattern",
    "layers_to_transform",
    "loftq_config",
    "lora_alpha",
    "lora_dropout",
    "lora_ga_config",
    "megatron_config",
    "megatron_core",
    "peft_type",
    "peft_version",
    "qalora_group_size",
    "r",
    "revision",
    "target_modules",
    "task_type",
    "use_rslora",
}
#: Values of `init_lora_weights` that leave the weights beside the adapters as they are.
_PLAIN_STARTS = (None, True, False, "gaussian", "eva", "orthogonal")
_INIT = "init_lora_weights"


def open_peft(path: Path, spec: ModelSpec, args: Any) -> Weights:
    """Open the adapters in a folder of PEFT's; the tensors are read later.

    `Weights.config` is their record. Raises CheckpointError, naming file, entry or tensor.
    """
    rank, alpha, rslora = _settings(path / PEFT_CONFIG)
    file = path / PEFT_FILE
    if not file.is_file():
        raise CheckpointError(f"{file} is missing: save the adapters with safe_serialization=True")
    ours = {}
    for name, theirs in names_at_hf(spec, args).items():
        for leaf, matrix in _MATRICES.items():
            ours[f"{_PREFIX}{theirs}.{matrix}"] = f"{name}.{leaf}"
    handle = open_safetensors(file)
    parts: dict[str, list[Part]] = {}
    for name in sorted(handle.keys()):
        if name not in ours:
            raise CheckpointError(f"{file}: {name} is of no linear of this model")
        view = handle.get_slice(name)
        kind = view.get_dtype()
        if kind not in DTYPES:
            raise CheckpointError(f"{file}: {name} has type {kind}, which is not read here")
        dtype = getattr(torch, DTYPES[kind])
        shape = tuple(view.get_shape())
        parts[ours[name]] = [Part(file, name, dtype, shape, partial(_sliced, view)).at_start()]
    weights = Weights(path, spec.name, args, parts)
    adapters = Adapters(rank, alpha, rslora, _sizes(file, weights, rank))
    return replace(weights, config=adapters.as_record())


def _settings(file: AnyPath) -> tuple[int, float, bool]:
    content = read_json(file)
    try:
        if content.get("peft_type") != "LORA":
            raise ValueError(
                f"peft_type is {content.get('peft_type')!r:.80}, and LORA is read here"
            )
        if content.get(_INIT) not in _PLAIN_STARTS:
            raise ValueError(
                f"{_INIT} is {content[_INIT]!r:.80}, which changes the weights beside the adapters"
            )
        for name, value in content.items():
            is_off = value in (None, False, "none", {}, [])
            if name not in (*_HARMLESS, _INIT) and not is_off:
                raise ValueError(f"{name} is {value!r:.80}, and titanlite has plain adapters only")
        rank = entry_of(content, "r", int)
        alpha = entry_of(content, "lora_alpha", float)
        if rank < 1 or alpha <= 0:
            raise ValueError(f"r is {rank} and lora_alpha {alpha}, expected numbers above 0")
        return rank, alpha, entry_of(content, "use_rslora", bool, False)
    except ValueError as error:
        raise CheckpointError(f"{file} cannot be used: {error}") from None


def _sizes(file: AnyPath, weights: Weights, rank: int) -> dict[str, Size]:
    """Raises CheckpointError where a linear lacks a matrix."""
    found = {}
    for name in weights.parts:
        linear, _, _ = name.rpartition(".")
        pair = [f"{linear}.{leaf}" for leaf in (DOWN, UP)]
        missing = [one for one in pair if one not in weights.parts]
        if missing:
            raise CheckpointError(f"{file} lacks one of two matrices: {missing[0]}")
        down, up = (weights.shape(one) for one in pair)
        if len(down) != 2 or len(up) != 2 or down[0] != rank or up[1] != rank:
            raise CheckpointError(
                f"{file}: the matrices of {linear} are {list(down)} and {list(up)}, and r is {rank}"
            )
        found[linear] = Size(down[1], up[0])
    return found


def _sliced(view: Any, slices: Slices) -> Tensor:
    tensor: Tensor = view[slices]
    return tensor


def base_of(path: AnyPath) -> str:
    """Return what adapter_config.json names as the weights beside the adapters; "": nothing."""
    name = read_json(path / PEFT_CONFIG).get("base_model_name_or_path")
    return name if isinstance(name, str) else ""


def save_peft(
    final: Path,
    adapters: Adapters,
    tensors: Mapping[str, Tensor],
    model: tuple[ModelSpec, Any],
    base: str,
) -> None:
    """Write adapters, by our names, as a folder of PEFT's, which appears when it is whole.

    base: path or name of the weights beside them. Raises CheckpointError when the folder exists, or
    the model has no Hugging Face form.
    """
    from safetensors.torch import save_file

    names = names_at_hf(*model)
    if not names:
        raise CheckpointError(f"{model[0].name} has no form for Hugging Face, which PEFT needs")
    content = {}
    for linear in adapters.sizes:
        for leaf, matrix in _MATRICES.items():
            tensor = tensors[f"{linear}.{leaf}"]
            content[f"{_PREFIX}{names[linear]}.{matrix}"] = tensor.contiguous()
    with new_folder(final) as folder:
        assert isinstance(folder, Path)
        save_file(content, folder / PEFT_FILE, metadata={"format": "pt"})
        config = _config(adapters, names, base)
        (folder / PEFT_CONFIG).write_bytes(as_json(config))
        for name in (PEFT_FILE, PEFT_CONFIG):
            with open(folder / name, "rb") as stream:
                sync(stream)


def _config(adapters: Adapters, names: Mapping[str, str], base: str) -> dict[str, Any]:
    # Last words of names, but whole names where other linears share the last word.
    others = {name.rpartition(".")[2] for ours, name in names.items() if ours not in adapters.sizes}
    targets: dict[str, None] = {}
    for linear in adapters.sizes:
        last = names[linear].rpartition(".")[2]
        targets[names[linear] if last in others else last] = None
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": adapters.rank,
        "lora_alpha": adapters.alpha,
        "use_rslora": adapters.rslora,
        "lora_dropout": 0.0,
        "target_modules": list(targets),
        "bias": "none",
        "fan_in_fan_out": False,
        "init_lora_weights": True,
        "inference_mode": True,
    }
