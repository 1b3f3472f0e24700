"""The tensors of two checkpoints side by side, read without a process group."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from titanlite.checkpoint.manifest import CheckpointError, Manifest, read_manifest
from titanlite.checkpoint.place import Place
from titanlite.checkpoint.storage import CheckedReader

#: Elements that are compared at a time, in float64.
_PIECE = 1 << 22


@dataclass(frozen=True)
class TensorDifference:
    """How one tensor differs. `left` and `right` are [dtype, shape], None where there is no such tensor."""

    name: str
    left: list[Any] | None
    right: list[Any] | None
    #: Elements that differ, and the largest difference of them: |a - b|, and |a - b| / max(|a|, |b|). 0 of tensors
    #: that cannot be compared. Infinity where one side alone is NaN or infinite.
    elements: int = 0
    absolute: float = 0.0
    relative: float = 0.0

    @property
    def comparable(self) -> bool:
        return self.left is not None and self.right is not None and self.left[1] == self.right[1]


class Contents:
    """Reads the tensors of one checkpoint, one at a time."""

    def __init__(self, folder: Place) -> None:
        """Raises CheckpointError when it is not a valid checkpoint."""
        self.folder = folder
        self.manifest: Manifest = read_manifest(folder)
        self._reader = CheckedReader(folder, self.manifest)
        self._reader.read_metadata()

    def read(self, name: str) -> torch.Tensor:
        """A whole tensor, on the CPU. Raises CheckpointError when it cannot be read."""
        dtype, shape = self.manifest.tensors[name]
        box = {name: torch.empty(shape, dtype=getattr(torch, dtype))}
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message=".*torch.distributed is disabled.*")
                dcp.load(box, storage_reader=self._reader, no_dist=True)
        except (CheckpointException, Exception) as error:
            raise CheckpointError(
                f"{name} cannot be read from {self.folder}: {error!r}; `titanlite checkpoint verify {self.folder}` "
                "tells which file is damaged"
            ) from error
        return box[name]


def compare(left: Contents, right: Contents) -> Iterator[TensorDifference]:
    """One entry per tensor of either, also of those that are equal, by name."""
    ours, theirs = left.manifest.tensors, right.manifest.tensors
    for name in sorted({*ours, *theirs}):
        found = TensorDifference(name, ours.get(name), theirs.get(name))
        if found.comparable:
            found = TensorDifference(name, found.left, found.right, *_measure(left.read(name), right.read(name)))
        yield found


def _measure(a: torch.Tensor, b: torch.Tensor) -> tuple[int, float, float]:
    """Elements that differ (two NaNs do not), the largest absolute difference, the largest relative one."""
    elements, absolute, relative = 0, 0.0, 0.0
    for x, y in zip(a.flatten().split(_PIECE), b.flatten().split(_PIECE), strict=True):
        if torch.equal(x, y):
            continue
        x, y = x.double(), y.double()
        differ = (x != y) & ~(x.isnan() & y.isnan())
        x, y = x[differ], y[differ]
        if not x.numel():
            continue
        elements += x.numel()
        gap = (x - y).abs().nan_to_num(nan=math.inf)
        scale = torch.maximum(x.abs(), y.abs())
        ratio = torch.where(gap.isinf(), gap, gap / scale)
        absolute, relative = max(absolute, gap.max().item()), max(relative, ratio.max().item())
    return elements, absolute, relative
