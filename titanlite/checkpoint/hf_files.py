"""Names of the files in which other programs keep weights. Importing it needs no torch."""

from __future__ import annotations

import re

from titanlite.checkpoint.paths import AnyPath, StorePath

HF_CONFIG = "config.json"
HF_INDEX = "model.safetensors.index.json"
HF_SINGLE = "model.safetensors"
META_CONFIG = "params.json"
META_FILES = "consolidated.*.pth"
#: Of PEFT: low-rank adapters without the weights beside them.
PEFT_CONFIG = "adapter_config.json"
PEFT_FILE = "adapter_model.safetensors"


def holds_adapters(path: AnyPath) -> bool:
    """Return whether a path is a folder of PEFT's."""
    return (path / PEFT_CONFIG).is_file()


def holds_weights(path: AnyPath) -> bool:
    """Return whether a path is a folder or file of weights of another program, by its content."""
    if isinstance(path, StorePath):
        return (path / HF_CONFIG).is_file() or (path / HF_INDEX).is_file()
    if path.is_file():
        with path.open("rb") as stream:
            return re.fullmatch(rb".{8}\{\s*\"", stream.read(10), re.DOTALL) is not None
    if holds_adapters(path):
        return False
    names = (HF_CONFIG, HF_INDEX, META_CONFIG)
    return any((path / name).is_file() for name in names) or any(path.glob("*.safetensors"))
