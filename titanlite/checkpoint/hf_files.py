"""Names of the files in which other programs keep weights. Importing it needs no torch."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from titanlite.checkpoint.store_paths import AnyPath, StorePath

if TYPE_CHECKING:
    from titanlite.models.spec import ModelSpec

HF_CONFIG = "config.json"
HF_INDEX = "model.safetensors.index.json"
HF_SINGLE = "model.safetensors"
#: Index of torch.distributed.checkpoint.
DCP_INDEX = ".metadata"
#: File of PEFT: low-rank adapters without the weights beside them.
PEFT_CONFIG = "adapter_config.json"
PEFT_FILE = "adapter_model.safetensors"


def hf_form(spec: ModelSpec, args: Any) -> tuple[Mapping[str, Any], dict[str, Any]]:
    """Return names and config.json at Hugging Face. Raises ValueError if there are none."""
    names = spec.hf_names(args)
    config = spec.hf_config(args)
    reason = spec.why_not(args, "checkpoint.last_save_in_hf")
    if reason:
        raise ValueError(reason)
    return names, config


def holds_adapters(path: AnyPath) -> bool:
    """Return whether a path is a folder of PEFT's."""
    return (path / PEFT_CONFIG).is_file()


def holds_weights(path: AnyPath) -> bool:
    """Return whether a path holds weights of another program."""
    if isinstance(path, StorePath):
        return (path / HF_CONFIG).is_file() or (path / HF_INDEX).is_file()
    if path.is_file():
        with path.open("rb") as stream:
            return re.fullmatch(rb".{8}\{\s*\"", stream.read(10), re.DOTALL) is not None
    if holds_adapters(path):
        return False
    has_config = any((path / name).is_file() for name in (HF_CONFIG, HF_INDEX))
    return has_config or any(path.glob("*.safetensors")) or is_torchtitan(path)


def is_torchtitan(path: AnyPath) -> bool:
    """Return whether it is a checkpoint of torchtitan until 0.2.2, by names in its index.

    The index is searched as bytes; titanlite's own has neither name.
    """
    file = path / DCP_INDEX
    if not isinstance(file, Path) or not file.is_file():
        return False
    return (
        re.search(rb"(?<![\w.])(tok_embeddings\.weight|train_state)", file.read_bytes()) is not None
    )
