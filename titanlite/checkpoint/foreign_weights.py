"""The weights of a model in files of another program: each tensor as parts that can be read in
slices.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from titanlite.checkpoint.errors import CheckpointError
from titanlite.checkpoint.hf_files import HF_CONFIG
from titanlite.models.llama_hf import permute

Slices = tuple[slice, ...]


@dataclass(frozen=True)
class Part:
    """A tensor in a file, which is one of ours or a part of it."""

    file: Path
    #: Its name there.
    name: str
    dtype: torch.dtype
    #: Shape of the part, in our tensor's dimensions, and where it begins there.
    shape: tuple[int, ...]
    #: Reads a slice of it, by our dimensions.
    read: Callable[[Slices], torch.Tensor]
    offsets: tuple[int, ...] = ()

    def at(self, *offsets: int) -> Part:
        return replace(self, offsets=offsets)

    def at_start(self) -> Part:
        return self.at(*(0 for _ in self.shape))

    def whole(self) -> torch.Tensor:
        return self.read(tuple(slice(0, size) for size in self.shape))

    def by_halves(self, heads: int) -> Part:
        """Return the rows of q or k in our order: of each head the even ones first."""
        orders = permute(torch.arange(self.shape[0])[:, None], heads)[:, 0]
        read = self.read

        def read_rows(slices: Slices) -> torch.Tensor:
            rows, columns = slices
            order = orders[rows]
            if not len(order):
                return read(slices)
            first = int(order.min())
            return read((slice(first, int(order.max()) + 1), columns))[order - first]

        return replace(self, read=read_rows)

    def stacked(self, place: int, row: int) -> Part:
        """Return the part as entry `place` of a stack, from row `row`."""
        read = self.read
        return replace(
            self,
            shape=(1, *self.shape),
            offsets=(place, row, *(0 for _ in self.shape[1:])),
            read=lambda slices: read(slices[1:])[None],
        )


@dataclass(frozen=True)
class Weights:
    """The weights of one model in files of another program, under our names (without "model.")."""

    path: Path
    family: str
    args: Any
    #: Our name → its parts. Tensors that the model does not have are here under their own names.
    parts: dict[str, list[Part]]
    #: The content of config.json.
    config: dict[str, Any] = field(default_factory=dict)
    #: A head in the file of a model that ties it to the embedding, and our name of that.
    spare_head: Part | None = None
    embedding: str = "tok_embeddings.weight"

    @property
    def context(self) -> Any:
        """`max_position_embeddings` of config.json, or of its text part; None: it has none."""
        name = "max_position_embeddings"
        part = self.config.get("text_config")
        return self.config.get(name, part.get(name) if isinstance(part, dict) else None)

    def shape(self, name: str) -> tuple[int, ...]:
        ends = []
        for part in self.parts[name]:
            spans = zip(part.offsets, part.shape, strict=True)
            ends.append([offset + size for offset, size in spans])
        return tuple(max(along) for along in zip(*ends, strict=True))

    def entries(self) -> dict[str, list[Any]]:
        """Return name → [dtype, shape, place], as in manifests."""
        found: dict[str, list[Any]] = {}
        for name, (first, *_) in self.parts.items():
            dtype = str(first.dtype).removeprefix("torch.")
            found[name] = [dtype, list(self.shape(name)), f"{first.file.name}: {first.name}"]
        return found

    def read(self, name: str) -> torch.Tensor:
        """Return a whole tensor on the CPU."""
        parts = self.parts[name]
        if len(parts) == 1:
            return parts[0].whole()
        tensor = torch.empty(self.shape(name), dtype=parts[0].dtype)
        for part in parts:
            spans = zip(part.offsets, part.shape, strict=True)
            tensor[tuple(slice(offset, offset + size) for offset, size in spans)] = part.whole()
        return tensor

    def check_head(self) -> None:
        """Raise CheckpointError for a separate head in a file whose config ties it."""
        head = self.spare_head
        if head is None or torch.equal(head.whole(), self.read(self.embedding)):
            return
        raise CheckpointError(
            f"{self.path}: {head.name} differs from the embedding, but {HF_CONFIG} says that they "
            "are tied: set tie_word_embeddings to false there, and model.overrides.tied"
        )


def on_meta(entries: Mapping[str, Sequence[Any]]) -> dict[str, torch.Tensor]:
    """Return tensors on the meta device; entries: name → [dtype, shape]."""
    found = {}
    for name, (dtype, shape, *_) in entries.items():
        found[name] = torch.empty(shape, dtype=getattr(torch, dtype), device="meta")
    return found


def total_bytes(entries: Mapping[str, Any]) -> int:
    """Return the bytes of tensors; entries: name → [dtype, shape]."""
    total = 0
    for dtype, shape, *_ in entries.values():
        total += getattr(torch, dtype).itemsize * math.prod(shape)
    return total
