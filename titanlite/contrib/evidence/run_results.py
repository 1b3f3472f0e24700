"""The results of a run, by name."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from titanlite.checkpoint.loaded import RESUME
from titanlite.checkpoint.manifest import digest_of, step_folder, steps_in
from titanlite.cli.hub.compare_checkpoints import Contents
from titanlite.runs.metrics_jsonl import FILE
from titanlite.runs.read_jsonl import read_lines

#: Figures, hashes of batches and tensors by name.
Facts = Mapping[str, Any]
#: Figures of a step that follow from the computation alone.
_FIGURES = ("loss", "grad_norm", "lr", "tokens_seen", "validation_loss")


def facts_of(run: Path, after: int, last: int) -> Facts:
    """Return batches, figures and tensors of the steps behind `after` to `last`."""
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
    """Return a tensor's numbers."""
    return tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes()


def hashes(facts: Facts) -> dict[str, Any]:
    """Return facts with the hash of each tensor in its place."""
    return {
        name: digest_of(as_bytes(value)) if isinstance(value, torch.Tensor) else value
        for name, value in facts.items()
    }


def distance(one: Facts, other: Facts) -> float:
    """Return the largest relative difference of a loss, weight or moment; infinity where one is
    missing or no number.
    """
    found = 0.0
    for name, value in one.items():
        is_number = isinstance(value, torch.Tensor) and value.is_floating_point()
        if is_number or name.startswith("loss"):
            a, b = (torch.as_tensor(side.get(name, math.nan)).double() for side in (one, other))
            gap = (a - b).norm() / a.norm().clamp(min=1e-30)
            found = max(found, gap.nan_to_num(math.inf).item())
    return found
