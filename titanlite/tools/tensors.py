"""Reads tensors of checkpoints without a process group, and compares two checkpoints."""

from __future__ import annotations

import contextlib
import math
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from titanlite.checkpoint.manifest import CheckpointError, Manifest, read_manifest
from titanlite.checkpoint.paths import AnyPath
from titanlite.checkpoint.storage import CheckedReader

#: Elements that are compared at a time, in float64.
_CHUNK = 1 << 22


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Hide DCP's warning about a single process."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*torch.distributed is disabled.*")
        yield


class Contents:
    """Reads the tensors of one checkpoint, one at a time."""

    def __init__(self, folder: AnyPath, manifest: Manifest | None = None) -> None:
        """Raises CheckpointError when it is not a valid checkpoint. manifest: of one that is not published yet."""
        self.folder = folder
        self.manifest: Manifest = manifest or read_manifest(folder)
        self._reader = CheckedReader(folder, self.manifest)
        self._reader.read_metadata()

    def read(self, name: str) -> torch.Tensor:
        """Return a whole tensor on the CPU. Raises CheckpointError when it cannot be read."""
        dtype, shape = self.manifest.tensors[name]
        state = {name: torch.empty(shape, dtype=getattr(torch, dtype))}
        try:
            with quiet():
                dcp.load(state, storage_reader=self._reader, no_dist=True)
        except (CheckpointException, Exception) as error:
            raise CheckpointError(
                f"{name} cannot be read from {self.folder}: {error!r}; `titanlite checkpoint verify {self.folder}` "
                "tells which file is damaged"
            ) from error
        return state[name]


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


def compare(left: Contents, right: Contents) -> Iterator[TensorDifference]:
    """Return one entry per tensor of either, also of equal ones, by name."""
    ours, theirs = left.manifest.tensors, right.manifest.tensors
    for name in sorted({*ours, *theirs}):
        found = TensorDifference(name, ours.get(name), theirs.get(name))
        if found.comparable:
            found = TensorDifference(name, found.left, found.right, *measure(left.read(name), right.read(name)))
        yield found


def measure(a: torch.Tensor, b: torch.Tensor) -> tuple[int, float, float]:
    """Return the elements that differ (two NaNs do not), and the largest absolute and relative difference."""
    elements, absolute, relative = 0, 0.0, 0.0
    for x, y in zip(a.flatten().split(_CHUNK), b.flatten().split(_CHUNK), strict=True):
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
