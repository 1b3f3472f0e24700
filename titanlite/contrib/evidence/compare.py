"""What two runs computed, compared bit for bit, and how far their numbers are from each other."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from titanlite.checkpoint.loaded import RESUME, WEIGHT
from titanlite.checkpoint.manifest import read_manifest, step_folder, steps_in
from titanlite.cli.hub.compare_checkpoints import Contents
from titanlite.contrib.evidence.faults import as_bytes
from titanlite.runs.lines import read_lines

#: Figures of a step that depend on nothing but the computation.
_FIGURES = ("loss", "grad_norm", "lr", "tokens_seen", "validation_loss")


@dataclass(frozen=True)
class Comparison:
    """Two runs over the steps that both have computed."""

    #: A hash of each side's figures, batches and tensors.
    left: str
    right: str
    steps: int
    tensors: int
    #: Names of the figures, batches and tensors that differ.
    figures: list[str]
    batches: list[str]
    differing: list[str]
    #: Largest relative difference of a loss, and relative distance of all weights at the end.
    loss: float
    weights: float

    @property
    def is_equal(self) -> bool:
        return not (self.figures or self.batches or self.differing)

    @property
    def text(self) -> str:
        every = [*self.batches, *self.figures, *self.differing]
        counts = (
            f"{len(self.figures)} figures and {len(self.batches)} batches of {self.steps} steps, "
            f"{len(self.differing)} of {self.tensors} tensors differ"
        )
        return f"{counts}: {', '.join(every[:2])}" if every else counts


def compare_runs(left: Path, right: Path, after: int, last: int) -> Comparison:
    """Compare two runs from the step behind `after` to `last`, with the tensors saved there."""
    hashes = hashlib.sha256(), hashlib.sha256()
    ours, theirs = _figures(left), _figures(right)
    figures = []
    loss = 0.0
    for step in range(after + 1, last + 1):
        a, b = ours.get(step, {}), theirs.get(step, {})
        for one, found in zip(hashes, (a, b), strict=True):
            one.update(json.dumps(found, sort_keys=True).encode())
        figures += [f"{name} of step {step}" for name in _FIGURES if a.get(name) != b.get(name)]
        loss = max(loss, _apart(a.get("loss", math.nan), b.get("loss", math.nan)))
    batches = []
    for step, one, other in _batches(left, right, after, last):
        if one != other:
            batches.append(f"batch of step {step + 1}")
    differing = []
    squares = [0.0, 0.0]
    sides = [Contents(step_folder(run / "checkpoint", last)) for run in (left, right)]
    names = sorted({name for side in sides for name in side.manifest.tensors})
    for name in names:
        pair = [side.read(name) if name in side.manifest.tensors else None for side in sides]
        for one, tensor in zip(hashes, pair, strict=True):
            one.update(name.encode() + (b"" if tensor is None else as_bytes(tensor)))
        a, b = pair
        if a is None or b is None or a.dtype != b.dtype or as_bytes(a) != as_bytes(b):
            differing.append(name)
        if name.startswith(WEIGHT) and a is not None and b is not None:
            squares[0] += (a.double() - b.double()).square().sum().item()
            squares[1] += a.double().square().sum().item()
    return Comparison(
        left=hashes[0].hexdigest()[:16],
        right=hashes[1].hexdigest()[:16],
        steps=last - after,
        tensors=len(names),
        figures=figures,
        batches=batches,
        differing=differing,
        loss=loss,
        weights=math.sqrt(squares[0] / squares[1]),
    )


def _figures(run: Path) -> dict[int, dict[str, Any]]:
    """Return the figures of each step; of a step that was computed again, the later ones."""
    found: dict[int, dict[str, Any]] = {}
    for row in read_lines(run / "metrics.jsonl"):
        kept = {name: row[name] for name in _FIGURES if name in row}
        found.setdefault(row["step"], {}).update(kept)
    return found


def _batches(left: Path, right: Path, after: int, last: int) -> Iterator[tuple[int, str, str]]:
    """Yield the hashes of the batch to come by each step that both have saved."""
    roots = [run / "checkpoint" for run in (left, right)]
    for step in sorted(set(steps_in(roots[0])) & set(steps_in(roots[1]))):
        if after <= step < last:
            one, other = (read_manifest(step_folder(root, step)).train for root in roots)
            yield step, one[RESUME]["next_batch"], other[RESUME]["next_batch"]


def _apart(a: float, b: float) -> float:
    gap = abs(a - b) / max(abs(a), abs(b), 1e-300)
    return math.inf if math.isnan(gap) else gap
