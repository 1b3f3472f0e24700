"""Weights in checkpoints of torchtitan 0.1 to 0.2.2: folders of torch.distributed.checkpoint
without a manifest. Since 0.2.0 the model's tensors have no prefix.

Optimizer, schedule and place in the text are of torchtitan's own classes: they are left out.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorStorageMetadata

from titanlite.checkpoint.dcp_index import parse_index
from titanlite.checkpoint.errors import CheckpointError
from titanlite.checkpoint.hf_files import DCP_INDEX
from titanlite.checkpoint.weights import Part, Slices, Weights
from titanlite.models.llama_hf import permute
from titanlite.models.spec import ModelSpec

#: Families that torchtitan has, and whether it rotates pairs of neighbours where we rotate halves.
_FAMILIES = {
    "llama3": True,
    "qwen3": False,
    "qwen3_moe": False,
    "deepseek_v3": False,
    "llama4": False,
    "gpt_oss": False,
}
#: Of names of weights in 0.1 and before.
_PREFIX = "model."
#: What its checkpoints hold besides weights.
_OTHERS = ("optimizer.", "lr_scheduler.", "train_state.", "dataloader")
#: RoPE's table until 0.1, and counters of experts' tokens, which begin anew.
_DERIVED = re.compile(r"freqs_cis|.*\.tokens_per_expert")
#: Parts of names, theirs → ours.
_RENAMED = {
    ".moe.router.gate.": ".feed_forward.gate.",
    ".moe.shared_experts.": ".feed_forward.shared.",
    ".moe.": ".feed_forward.",
}
#: Of families whose experts are stacks as those of transformers: their name → ours, and whether
#: rows and columns change places.
_STACKS = {
    "llama4": {"w1": ("gate_up", True), "w3": ("gate_up", True), "w2": ("down", True)},
    "gpt_oss": {
        "mlp1_weight": ("gate_up", True),
        "mlp1_bias": ("gate_up_bias", False),
        "mlp2_weight": ("down", True),
        "mlp2_bias": ("down_bias", False),
    },
}


def open_torchtitan(path: Path, spec: ModelSpec, args: Any) -> Weights:
    """Return the weights in a folder `step-N` of torchtitan's. spec, args: of their model, which
    the folder does not tell.

    Raises CheckpointError.
    """
    family = spec.name
    if family not in _FAMILIES:
        raise CheckpointError(
            f"{path} is of torchtitan, whose models are {', '.join(_FAMILIES)} here: set model.name"
        )
    stored = _stored(path)
    if args.vocab_size is None and "tok_embeddings.weight" in stored:
        args = replace(args, vocab_size=stored["tok_embeddings.weight"].shape[0])
    heads = {"wq": args.n_heads, "wk": args.kv_heads} if _FAMILIES[family] else {}
    parts: dict[str, list[Part]] = {}
    # The gates of Llama 4's experts, w1, come before w3.
    for _, tensor in sorted(stored.items()):
        ours, part = _our_part(tensor, family, heads)
        if _is_idle(part, args):
            continue
        before = parts.setdefault(ours, [])
        at = sum(one.shape[-1] for one in before)
        before.append(part.at(*(0 for _ in part.shape[1:]), at) if before else part.at_start())
    head = None
    if args.tied and "tok_embeddings.weight" in parts:
        (head, *_) = parts.pop("output.weight", [None])
        parts["output.weight"] = parts["tok_embeddings.weight"]
    return Weights(path, family, args, parts, spare_head=head)


def _our_part(tensor: _Stored, family: str, heads: Mapping[str, int]) -> tuple[str, Part]:
    """Return our name of a tensor, and it in our layout."""
    part = Part(tensor.file, tensor.name, tensor.dtype, tensor.shape, tensor.read)
    ours, is_transposed = _our_name(tensor.name, family)
    if is_transposed and len(part.shape) == 3:
        part = _transposed(part)
    if len(part.shape) == 2:
        part = _by_halves(part, heads.get(tensor.name.rpartition(".")[0].rpartition(".")[2], 0))
    return ours, part


def _is_idle(part: Part, args: Any) -> bool:
    """Return whether it is a bias of experts at 0, as in torchtitan's Qwen3, that we have not."""
    if getattr(args, "expert_bias", False) or not part.name.endswith(".expert_bias"):
        return False
    return not part.whole().any()


def _our_name(name: str, family: str) -> tuple[str, bool]:
    """Return our name of a tensor, and whether rows and columns change places."""
    ours = name
    for there, here in _RENAMED.items():
        ours = ours.replace(there, here)
    if family == "gpt_oss" and ours.endswith(".sinks"):
        return f"{ours}.weight", False
    place, _, leaf = ours.rpartition(".")
    if place.endswith(".experts") and leaf in _STACKS.get(family, {}):
        leaf, is_transposed = _STACKS[family][leaf]
        return f"{place}.{leaf}", is_transposed
    return ours, False


def _transposed(part: Part) -> Part:
    """Return the part of stacked matrices with rows and columns in each other's place."""
    *before, rows, columns = part.shape

    def read(slices: Slices) -> torch.Tensor:
        *first, ours, theirs = slices
        return part.read((*first, theirs, ours)).mT

    return replace(part, shape=(*before, columns, rows), read=read)


def _by_halves(part: Part, heads: int) -> Part:
    """Return the rows of q or k in our order: of each head the even ones first.

    heads: 0: of another matrix, which stays as it is.
    """
    if not heads or part.shape[0] % (2 * heads):
        return part
    orders = permute(torch.arange(part.shape[0])[:, None], heads)[:, 0]

    def read(slices: Slices) -> torch.Tensor:
        rows, columns = slices
        order = orders[rows]
        if not len(order):
            return part.read(slices)
        first = int(order.min())
        return part.read((slice(first, int(order.max()) + 1), columns))[order - first]

    return replace(part, read=read)


# Files


@dataclass(frozen=True)
class _Stored:
    """A tensor in pieces that lie in files."""

    folder: Path
    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    #: Where each piece begins in the tensor, its shape, and its place.
    pieces: list[tuple[tuple[int, ...], tuple[int, ...], _StorageInfo]]

    @property
    def file(self) -> Path:
        return self.folder / self.pieces[0][2].relative_path

    def read(self, slices: Slices) -> torch.Tensor:
        """Return a part of the tensor; a piece besides it is in memory."""
        begin = [one.start for one in slices]
        end = [one.stop for one in slices]
        sizes = [max(b - a, 0) for a, b in zip(begin, end, strict=True)]
        # A hole between pieces stays no number.
        found = torch.full(sizes, math.nan, dtype=self.dtype)
        for offsets, shape, place in self.pieces:
            low = list(map(max, begin, offsets))
            high = list(map(min, end, (a + n for a, n in zip(offsets, shape, strict=True))))
            if any(a >= b for a, b in zip(low, high, strict=True)):
                continue
            here = _box(low, high, begin)
            found[here] = self._piece(shape, place)[_box(low, high, offsets)]
        return found

    def _piece(self, shape: tuple[int, ...], place: _StorageInfo) -> torch.Tensor:
        file = self.folder / place.relative_path
        try:
            with file.open("rb") as stream:
                stream.seek(place.offset)
                content = io.BytesIO(stream.read(place.length))
            tensor = torch.load(content, map_location="cpu", weights_only=True)
            if tensor.shape != shape or tensor.dtype != self.dtype:
                raise ValueError(f"it is {tensor.dtype} {list(tensor.shape)}")
        # torch has many ways to refuse a cut file, or a pickle of other things than tensors.
        except Exception as error:
            raise CheckpointError(f"{file}: {self.name} cannot be read: {error}") from None
        return tensor.detach()


def _box(low: list[int], high: list[int], origin: Any) -> Slices:
    spans = zip(low, high, origin, strict=True)
    return tuple(slice(a - start, b - start) for a, b, start in spans)


def _stored(path: Path) -> dict[str, _Stored]:
    """Return the tensors of the model in a folder, by their names there."""
    file = path / DCP_INDEX
    try:
        sizes = {one.name: one.stat().st_size for one in path.glob("*.distcp")}
        tensors, places = parse_index(file.read_bytes(), sizes, with_objects=True)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{file} cannot be used: {error}") from None
    found = {}
    for name, tensor in tensors.items():
        plain = name.removeprefix(_PREFIX)
        is_weight = tensor.properties.dtype.is_floating_point and not name.startswith(_OTHERS)
        if not is_weight or _DERIVED.fullmatch(plain):
            continue
        pieces = _pieces(file, name, tensor, places)
        found[plain] = _Stored(path, plain, tensor.properties.dtype, tuple(tensor.size), pieces)
    return found


def _pieces(
    file: Path,
    name: str,
    tensor: TensorStorageMetadata,
    places: Mapping[MetadataIndex, _StorageInfo],
) -> list[tuple[tuple[int, ...], tuple[int, ...], _StorageInfo]]:
    """Return the pieces of a tensor. Raises CheckpointError unless they make up the whole of it."""
    found = []
    for chunk in tensor.chunks:
        place = places.get(MetadataIndex(name, chunk.offsets))
        ends = zip(chunk.offsets, chunk.sizes, tensor.size, strict=False)
        if place is None or any(begin + size > most for begin, size, most in ends):
            raise CheckpointError(f"{file}: a piece of {name} lies nowhere, or outside of it")
        found.append((tuple(chunk.offsets), tuple(chunk.sizes), place))
    if not found or sum(math.prod(size) for _, size, _ in found) != math.prod(tensor.size):
        raise CheckpointError(f"{file}: the pieces of {name} do not make up {list(tensor.size)}")
    return found
