"""Faults put into a copy of a checkpoint as a broken machine would write them: with right hashes."""

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
from titanlite.utils import atomic_write

#: Changes a rank's part of a tensor in place; returns whether it did.
Fault = Callable[[MetadataIndex, torch.Tensor], bool]


def inject(folder: Path, fault: Fault, everywhere: bool = False) -> str:
    """Change the first part of a tensor that a fault changes, or all; return that tensor's name."""
    manifest = read_manifest(folder)
    found = ""
    for index, place, part in parts(folder):
        before = as_bytes(part)
        if (found and not everywhere) or not fault(index, part):
            continue
        found = found or index.fqn
        file = folder / place.relative_path
        data = file.read_bytes()
        at = data.index(before, place.offset)
        atomic_write(file, data[:at] + as_bytes(part) + data[at + len(before) :])
    hashes = {}
    for name, digest in manifest.hashes.items():
        hashes[name] = file_digest(folder / name, digest.partition(":")[0])
    atomic_write(folder / FILE, replace(manifest, hashes=hashes).to_json())
    return found


def parts(folder: Path) -> Iterator[tuple[MetadataIndex, Any, torch.Tensor]]:
    """Yield the index, the place and the content of each stored part of a tensor."""
    places = CheckedReader(folder, read_manifest(folder)).read_metadata().storage_data
    for index, place in places.items():
        data = (folder / place.relative_path).read_bytes()
        stored = data[place.offset : place.offset + place.length]
        yield index, place, torch.load(io.BytesIO(stored), weights_only=True)


def as_bytes(tensor: torch.Tensor) -> bytes:
    """Return the numbers of a tensor as they are in memory."""
    return _bytes_of(tensor.contiguous()).numpy().tobytes()


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.flatten().view(torch.uint8)


def flipped_bit(index: MetadataIndex, part: torch.Tensor) -> bool:
    """Flip a bit of the largest number of an optimizer's state: bfloat16's last one."""
    is_moment = index.fqn.startswith("optimizer.") and part.is_floating_point()
    if not is_moment or part.numel() < 2:
        return False
    size = part.element_size()
    _bytes_of(part)[int(part.flatten().abs().argmax()) * size + size - 2] ^= 1
    return True


def last_bits(size: int) -> Fault:
    """Return the fault that flips the last bit of each weight, in numbers of so many bytes."""

    def fault(index: MetadataIndex, part: torch.Tensor) -> bool:
        if not index.fqn.startswith(WEIGHT) or not part.is_floating_point():
            return False
        width = part.element_size()
        _bytes_of(part)[width - min(size, width) :: width] ^= 1
        return True

    return fault


def other_generator(index: MetadataIndex, part: torch.Tensor) -> bool:
    """Give a rank the generator of another seed."""
    if index.fqn != RNG:
        return False
    state = torch.Generator().manual_seed(1).get_state()
    part.flatten()[: state.numel()] = state
    return True


def stale_weight(older: Path) -> Fault:
    """Return the fault that takes a part of a weight from an older checkpoint."""
    before = {index: part for index, _, part in parts(older)}

    def fault(index: MetadataIndex, part: torch.Tensor) -> bool:
        if not index.fqn.startswith(WEIGHT) or torch.equal(part, before[index]):
            return False
        part.copy_(before[index])
        return True

    return fault
