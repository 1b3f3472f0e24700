"""What two runs must share for one to resume the other's checkpoints, and for equal numbers."""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import asdict
from typing import Any

import torch

from titanlite.assembly.datasets import Datasets
from titanlite.data.tokenizer import Tokenizer
from titanlite.metrics.throughput import device_name
from titanlite.run.config import RunConfig
from titanlite.utils import is_dotted


def fingerprints(model: str, args: Any, datasets: Datasets) -> dict[str, str]:
    """Return what two runs must share for one to resume the other's checkpoints.

    model: `model.name`.
    """
    order = {name: value for name, value in datasets.train.settings.items() if name != "epochs"}
    return {
        **weights_fingerprints(model, args, datasets.tokenizer),
        "data": datasets.train.fingerprint[:16],
        "data order": ", ".join(f"{name} {value}" for name, value in order.items()),
    }


def weights_fingerprints(model: str, args: Any, tokenizer: Tokenizer) -> dict[str, str]:
    """Return the part of `fingerprints` on which the meaning of weights depends."""
    shape = asdict(args)
    # The length of the RoPE tables changes no weight.
    shape.pop("max_seq_len")
    # Of an MoE layer's router, they change no output.
    for name in ("aux_loss", "z_loss"):
        shape.pop(name, None)
    # Older checkpoints know no cap.
    if shape.get("final_softcap") == 0:
        del shape["final_softcap"]
    if is_dotted(model):
        shape["model"] = os.path.basename(model)
    digest = hashlib.sha256(json.dumps(shape, sort_keys=True, default=str).encode()).hexdigest()
    return {"model": digest[:16], "tokenizer": tokenizer.fingerprint[:16]}


#: Keys that change how sums are rounded, by section.
_ROUNDING = {
    "training": (
        "mixed_precision_param",
        "mixed_precision_reduce",
        "gradient_sync",
        "fsdp_units",
        "fsdp_min_params",
        "reshard_after_forward",
        "loss_chunks",
        "enable_loss_parallel",
        "enable_cpu_offload",
        "compile",
    ),
    "compile": ("components", "backend"),
    "experimental": (
        "enable_async_tensor_parallel",
        "pipeline_parallel_schedule",
        "pipeline_parallel_split_points",
        "pipeline_parallel_microbatches",
    ),
    "lora": ("dropout",),
    "activation_checkpoint": ("mode", "selective_ac_option"),
    "float8": (
        "enable_float8_linear",
        "recipe_name",
        "enable_fsdp_float8_all_gather",
        "filter_fqns",
        "min_features",
        "emulate",
    ),
}


def rounding(run: RunConfig, device: torch.device) -> dict[str, str]:
    """Return what changes the rounding of a step's loss and norm, by name."""
    found = {
        "device": device_name(device),
        "torch": torch.__version__,
        "threads": str(torch.get_num_threads()),
        "batch.micro_batch_size": str(run.batch.micro_batch_size),
        "batch.accumulation": str(run.batch.accumulation),
        "deterministic": str(run.debug.deterministic),
    }
    for name, value in asdict(run.mesh).items():
        found[f"mesh.{name}"] = str(value)
    for name, keys in _ROUNDING.items():
        section = getattr(run, name)
        for key in keys:
            found[f"{name}.{key}"] = str(getattr(section, key))
    return found
