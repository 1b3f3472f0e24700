"""One rank's tensors in a safetensors file: its shard of a sharded tensor, the whole of others.

The bytes depend on content and place of the shards alone. Ranks that hold the same have the same
file, and its hash tells.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from titanlite.checkpoint.dcp_files import Written
from titanlite.checkpoint.errors import CheckpointError
from titanlite.checkpoint.manifest import FAST_HASH, dtype_name, new_hash
from titanlite.checkpoint.safetensors_header import DTYPES, header
from titanlite.checkpoint.state_dict import Tensors
from titanlite.dist.local_parts import plain_local
from titanlite.utils import new_file, parse_json, sync


def write_part(path: Path, tensors: Tensors) -> Written:
    """Write this rank's part of `tensors`, durably; return its bytes and its hash."""
    digest = new_hash(FAST_HASH)
    size = 0
    with new_file(path) as stream:
        for block in _blocks(tensors):
            digest.update(block)
            size += memoryview(block).nbytes
            stream.write(block)
        sync(stream)
    return Written(size, f"{FAST_HASH}:{digest.hexdigest()}")


def _blocks(tensors: Tensors) -> Any:
    entries = []
    for name in sorted(tensors):
        part = plain_local(tensors[name])
        dtype = dtype_name(part.dtype)
        if dtype not in DTYPES:
            raise CheckpointError(f"{name} is {part.dtype}, which a local save cannot hold")
        entries.append((name, dtype, list(part.shape), part.nbytes))
    yield header(entries, layout=layout(tensors))
    for name in sorted(tensors):
        local = plain_local(tensors[name]).detach().cpu().contiguous()
        yield local.reshape(-1).view(torch.uint8).numpy().data


def read_part(path: Path, tensors: Tensors) -> None:
    """Fill this rank's part of `tensors` from a file, which may hold more.

    Raises CheckpointError where the file lacks one, or has another place of it.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file, torch.no_grad():
            places = parse_json((file.metadata() or {}).get("layout", "{}"))
            for name, tensor in tensors.items():
                local = plain_local(tensor)
                saved = file.get_tensor(name)
                found = [saved.dtype, saved.shape, places.get(name)]
                wanted = [local.dtype, local.shape, place_of(tensor)]
                if found != wanted:
                    raise CheckpointError(f"{path}: {name} is {found} there, {wanted} here")
                local.copy_(saved)
    except (OSError, SafetensorError, ValueError) as error:
        raise CheckpointError(f"{path} is no part of a local save: {error}") from None


def layout(tensors: Mapping[str, torch.Tensor]) -> str:
    """Return where the local part of each tensor lies in the whole, as JSON."""
    places = {name: place_of(tensor) for name, tensor in sorted(tensors.items())}
    return json.dumps(places, separators=(",", ":"))


def place_of(tensor: torch.Tensor) -> list[Any]:
    """Return the whole shape of a tensor, and this rank's place in it; replicas have the same."""
    if not isinstance(tensor, DTensor):
        return [list(tensor.shape)]
    mesh = tensor.device_mesh
    where = mesh.get_coordinate() or ()
    cuts = []
    for dimension, placement in enumerate(tensor.placements):
        if not placement.is_replicate():
            cuts.append(f"{placement} {where[dimension]}/{mesh.size(dimension)}")
    return [list(tensor.shape), *cuts]
