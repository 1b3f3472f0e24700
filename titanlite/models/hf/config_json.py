"""A config.json of `transformers`: found, read, and made a config that names no code."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Mapping
from typing import Any

from titanlite.config.errors import Problem
from titanlite.models.spec import ShapeError, names_like, shown
from titanlite.utils import pip_install

#: Entries that name Python files for `transformers` to run.
_CODE = ("auto_map", "trust_remote_code")
#: Entries that may name kernels for `transformers` to fetch from the hub and run, and values that
#: name none.
_KERNELS = (
    "attn_implementation",
    "_attn_implementation",
    "experts_implementation",
    "_experts_implementation",
)
_NO_KERNELS = (None, "eager", "sdpa", "flex_attention", "batched_mm", "grouped_mm")


def refused(message: str, advice: str = "", field: str = "hf_config") -> ShapeError:
    """Return the error of an untrainable config. field: of `[model]`."""
    return ShapeError(Problem("model", field, message, advice))


def _without_code(value: Any) -> Any:
    """Drop entries that let `transformers` run foreign code."""
    if isinstance(value, list):
        return [_without_code(item) for item in value]
    if not isinstance(value, dict):
        return value
    kept = {}
    for name, item in value.items():
        names_kernel = name in _KERNELS and item not in _NO_KERNELS
        if name not in _CODE and not names_kernel:
            kept[name] = _without_code(item)
    return kept


def read_config(content: Mapping[str, Any]) -> Any:
    """Return the `transformers` config of a config.json, without code. Raises ShapeError."""
    # Their lines are about kernels for other devices.
    for name in ("torchao", "torch.utils._pytree"):
        logging.getLogger(name).setLevel(logging.ERROR)
    try:
        from transformers import CONFIG_MAPPING
        from transformers.models.auto.modeling_auto import (
            MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CAUSAL,
        )
    except ImportError as error:
        message = f'"hf" needs the package transformers: {error}'
        raise refused(message, pip_install("transformers"), "name") from error
    kind: Any = content.get("model_type")
    if not isinstance(kind, str) or kind not in CAUSAL:
        near = names_like(str(kind), CAUSAL).partition("; there are")[0]
        raise refused(
            f"transformers has no causal language model of model_type {shown(kind)}", near
        )
    try:
        config = CONFIG_MAPPING[kind].from_dict(_without_code(dict(content)))
    except Exception as error:  # `transformers` raises its own classes for wrong values
        raise refused(f"transformers refuses the config of a {kind}: {error}") from error
    if not hasattr(config, "vocab_size"):
        raise refused(f"a {kind} has no vocab_size; only text models are supported")
    return config


def config_file(source: str) -> str:
    """Return the path of a config.json: a file, its folder, or a model's id on the hub to download.

    Raises what `huggingface_hub` and its HTTP client raise.
    """
    path = os.path.join(source, "config.json") if os.path.isdir(source) else source
    if not os.path.exists(path) and re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", source):
        from huggingface_hub import hf_hub_download

        # Without a network it takes what an earlier download has left.
        path = hf_hub_download(source, "config.json")
    return path
