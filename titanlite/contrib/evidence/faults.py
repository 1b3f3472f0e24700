"""Faults in a copy of a checkpoint, with right hashes: as a broken machine would write them."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import MetadataIndex

from titanlite.checkpoint.dcp_files import CheckedReader
from titanlite.checkpoint.loaded import WEIGHT
from titanlite.checkpoint.manifest import FILE, file_digest, read_manifest
from titanlite.checkpoint.state_dict import RNG
from titanlite.contrib.evidence.facts import as_bytes
from titanlite.utils import atomic_write

#: Changes a stored part of a tensor in place; returns whether it did.
Fault = Callable[[MetadataIndex, torch.Tensor], bool]


def inject(folder: Path, fault: Fault, everywhere: bool = False) -> bool:
    """Change the first part that a fault can change, or all; return whether there is one."""
    manifest = read_manifest(folder)
    found = False
    for index, place, part in _parts(folder):
        before = as_bytes(part)
        if (found and not everywhere) or not fault(index, part):
            continue
        found = True
        file = folder / place.relative_path
        data = file.read_bytes()
        at = data.index(before, place.offset)
        atomic_write(file, data[:at] + as_bytes(part) + data[at + len(before) :])
    hashes = {}
    for name, digest in manifest.hashes.items():
        hashes[name] = file_digest(folder / name, digest.partition(":")[0])
    atomic_write(folder / FILE, replace(manifest, hashes=hashes).to_json())
    return found


def _parts(folder: Path) -> Iterator[tuple[MetadataIndex, Any, torch.Tensor]]:
    """Yield index, place and content of each stored part of a tensor."""
    places = CheckedReader(folder, read_manifest(folder)).read_metadata().storage_data
    for index, place in places.items():
        data = (folder / place.relative_path).read_bytes()[place.offset :]
        yield index, place, torch.load(io.BytesIO(data[: place.length]), weights_only=True)


def flips(prefix: str, size: int, every: bool = False) -> Fault:
    """Return the fault that flips a bit of a tensor's largest number, or of every number.

    size: the bit is the last one of a number of so many bytes.
    """

    def fault(index: MetadataIndex, part: torch.Tensor) -> bool:
        if not index.fqn.startswith(prefix) or not part.is_floating_point() or part.numel() < 2:
            return False
        width = part.element_size()
        chosen = part.abs() >= (0 if every else part.abs().max())
        part.flatten().view(torch.uint8)[width - min(size, width) :: width] ^= chosen.flatten()
        return True

    return fault


def other_generator(index: MetadataIndex, part: torch.Tensor) -> bool:
    """Give a rank the generator of another seed."""
    state = torch.Generator().manual_seed(1).get_state()
    if index.fqn == RNG:
        part.flatten()[: state.numel()] = state
    return index.fqn == RNG


def stale(older: Path) -> Fault:
    """Return the fault that takes a part of a weight from an older checkpoint."""
    before = {index: part for index, _, part in _parts(older)}

    def fault(index: MetadataIndex, part: torch.Tensor) -> bool:
        if not index.fqn.startswith(WEIGHT) or torch.equal(part, before[index]):
            return False
        part.copy_(before[index])
        return True

    return fault
