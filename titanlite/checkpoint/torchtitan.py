"""Weights in checkpoints of torchtitan 0.1 to 0.2.2: folders of torch.distributed.checkpoint
without a manifest. Since 0.2.0 the model's tensors have no prefix.

Optimizer, schedule and place in the text are of torchtitan's own classes: they are left out.
"""

from __future__ import annotations

import math
import re
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import DefaultLoadPlanner, FileSystemReader
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from titanlite.checkpoint.dcp_files import parse_index
from titanlite.checkpoint.errors import CheckpointError
from titanlite.checkpoint.foreign_weights import Part, Slices, Weights
from titanlite.checkpoint.hf_files import DCP_INDEX
from titanlite.models.spec import ModelSpec

#: Families that torchtitan has, and whether it rotates pairs of neighbours where we rotate halves.
_FAMILIES = {
    "llama3": True,
    "qwen3": False,
    "qwen3_moe": False,
    "deepseek_v3": False,
}
#: Prefix of names of weights in 0.1 and before.
_PREFIX = "model."
#: Entries of its checkpoints besides weights.
_OTHERS = ("optimizer.", "lr_scheduler.", "train_state.", "dataloader")
#: RoPE's table until 0.1, and counters of experts' tokens, which begin anew.
_DERIVED = re.compile(r"freqs_cis|.*\.tokens_per_expert")
#: Parts of names, theirs → ours.
_RENAMED = {
    ".moe.router.gate.": ".feed_forward.gate.",
    ".moe.shared_experts.": ".feed_forward.shared.",
    ".moe.": ".feed_forward.",
}


def open_torchtitan(path: Path, spec: ModelSpec, args: Any) -> Weights:
    """Return the weights in torchtitan's folder `step-N`. Raises CheckpointError.

    spec, args: of their model, which the folder does not tell.
    """
    family = spec.name
    if family not in _FAMILIES:
        raise CheckpointError(
            f"{path} is of torchtitan, whose models are {', '.join(_FAMILIES)} here: set "
            "model.name. Others: torchtitan's scripts/checkpoint_conversion/convert_to_hf.py"
        )
    stored = _stored(path)
    if args.vocab_size is None and "tok_embeddings.weight" in stored:
        args = replace(args, vocab_size=stored["tok_embeddings.weight"].shape[0])
    heads = {"wq": args.n_heads, "wk": args.kv_heads} if _FAMILIES[family] else {}
    parts: dict[str, list[Part]] = {}
    for name, part in stored.items():
        is_bias = name.endswith(".expert_bias") and not getattr(args, "expert_bias", False)
        # torchtitan's Qwen3 has one, at 0.
        if is_bias and not part.whole().any():
            continue
        ours = name
        for there, here in _RENAMED.items():
            ours = ours.replace(there, here)
        number = heads.get(name.rpartition(".")[0].rpartition(".")[2], 0)
        # A bias stays as it is.
        if number and len(part.shape) == 2 and part.shape[0] % (2 * number) == 0:
            part = part.by_halves(number)
        parts[ours] = [part.at_start()]
    head = None
    if args.tied and "tok_embeddings.weight" in parts:
        (head, *_) = parts.pop("output.weight", [None])
        parts["output.weight"] = parts["tok_embeddings.weight"]
    return Weights(path, family, args, parts, spare_head=head)


# Files


class _Slice(DefaultLoadPlanner):
    """Lets DCP read into one tensor."""

    def __init__(self, target: torch.Tensor) -> None:
        super().__init__()
        self._target = target

    def lookup_tensor(self, index: MetadataIndex) -> torch.Tensor:
        return self._target


def _stored(path: Path) -> dict[str, Part]:
    file = path / DCP_INDEX
    reader = FileSystemReader(path)
    try:
        sizes = {one.name: one.stat().st_size for one in path.glob("*.distcp")}
        tensors, reader.storage_data = parse_index(file.read_bytes(), sizes, with_objects=True)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{file} cannot be used: {error}") from None
    found = {}
    for name, tensor in tensors.items():
        plain = name.removeprefix(_PREFIX)
        is_weight = tensor.properties.dtype.is_floating_point and not name.startswith(_OTHERS)
        if not is_weight or _DERIVED.fullmatch(plain):
            continue
        if sum(math.prod(piece.sizes) for piece in tensor.chunks) != math.prod(tensor.size):
            raise CheckpointError(
                f"{file}: the pieces of {name} do not make up {list(tensor.size)}"
            )
        read = partial(_read, reader, name, tensor)
        found[plain] = Part(path, plain, tensor.properties.dtype, tuple(tensor.size), read)
    return found


def _read(
    reader: FileSystemReader, name: str, tensor: TensorStorageMetadata, slices: Slices
) -> torch.Tensor:
    """A piece besides the part is in memory."""
    begin = torch.Size([one.start for one in slices])
    sizes = torch.Size([max(one.stop - one.start, 0) for one in slices])
    # A hole between pieces stays no number.
    found = torch.full(sizes, math.nan, dtype=tensor.properties.dtype)
    wanted = ChunkStorageMetadata(begin, sizes)
    try:
        items = create_read_items_for_chunk_list(name, tensor, [wanted])
        reader.read_data(LoadPlan(items), _Slice(found)).wait()
    # torch has many ways to refuse a cut file, or a pickle of other things than tensors.
    except Exception as error:
        raise CheckpointError(f"{reader.path}: {name} cannot be read: {error}") from None
    return found
