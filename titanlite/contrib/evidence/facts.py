"""What a run computed, as names and values that two runs must share bit for bit."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from titanlite.checkpoint.loaded import RESUME
from titanlite.checkpoint.manifest import digest_of, step_folder, steps_in
from titanlite.cli.hub.compare_checkpoints import Contents
from titanlite.runs.jsonl import FILE
from titanlite.runs.lines import read_lines

#: Figures, hashes of batches and tensors by name.
Facts = Mapping[str, Any]
#: Figures of a step that follow from the computation alone.
_FIGURES = ("loss", "grad_norm", "lr", "tokens_seen", "validation_loss")


def facts_of(run: Path, after: int, last: int) -> Facts:
    """Return the hashes of the batches behind the steps `after` to `last`, the figures of these
    steps but the first, and the tensors that were saved last.
    """
    found: dict[str, Any] = {}
    root = run / "checkpoint"
    for step in steps_in(root):
        if max(after, 1) <= step <= last:
            contents = Contents(step_folder(root, step))
            found[f"batch of step {step + 1}"] = contents.manifest.train[RESUME]["next_batch"]
    for row in read_lines(run / FILE):
        for name in _FIGURES:
            if name in row and after < row["step"] <= last:
                found[f"{name} of step {row['step']}"] = row[name]
    for name in contents.manifest.tensors:
        found[name] = contents.read(name)
    return found


def as_bytes(tensor: torch.Tensor) -> bytes:
    """Return the numbers of a tensor as they are in memory."""
    return tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes()


def hashes(facts: Facts) -> dict[str, Any]:
    """Return facts with the hash of each tensor in its place."""
    plain = dict(facts)
    for name, value in facts.items():
        if isinstance(value, torch.Tensor):
            plain[name] = digest_of(as_bytes(value))
    return plain


class Distance(NamedTuple):
    """How far the numbers of two runs are from each other."""

    #: Largest relative difference of a step's loss.
    loss: float
    #: Largest relative distance of a weight or moment, as vectors.
    tensors: float

    def is_within(self, other: Distance) -> bool:
        return self.loss <= other.loss and self.tensors <= other.tensors

    def __str__(self) -> str:
        return f"loss {self.loss:.1e}, tensors {self.tensors:.1e}"


def distance(one: Facts, other: Facts) -> Distance:
    """Return how far two runs of the same steps are from each other."""
    found = [0.0, 0.0]
    for name, value in one.items():
        is_tensor = isinstance(value, torch.Tensor)
        if name.startswith("loss") or (is_tensor and value.is_floating_point()):
            a, b = (torch.as_tensor(side[name]).double() for side in (one, other))
            gap = (a - b).norm() / a.norm().clamp(min=1e-30)
            found[is_tensor] = max(found[is_tensor], gap.item())
    return Distance(*found)
