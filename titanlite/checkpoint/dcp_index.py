"""DCP's index, read as data.

It is a pickle that another program may have written, so no code in it may run.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Mapping
from typing import Any, cast

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from titanlite.checkpoint.manifest import Manifest, dtype_name

_METADATA = "torch.distributed.checkpoint.metadata"
_FILESYSTEM = "torch.distributed.checkpoint.filesystem"
#: Names that the index of a checkpoint of tensors holds, besides `torch.Size` and types such as
#: `torch.float32`.
_KNOWN = {
    (_METADATA, "Metadata"),
    (_METADATA, "TensorStorageMetadata"),
    (_METADATA, "TensorProperties"),
    (_METADATA, "ChunkStorageMetadata"),
    (_METADATA, "MetadataIndex"),
    (_METADATA, "StorageMeta"),
    (_METADATA, "_MEM_FORMAT_ENCODING"),
    (_FILESYSTEM, "_StorageInfo"),
    ("torch.serialization", "_get_layout"),
    ("pathlib", "PosixPath"),
    # Python 3.13.
    ("pathlib._local", "PosixPath"),
    # Members of an enum, as Python 3.11.0 to 3.11.3 writes them; a record here, never called.
    ("builtins", "getattr"),
}


class _Record:
    """Replaces every object in the pickle: holds its state, and does nothing."""

    state: Any = None

    def __init__(self, *_: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _Object(_Record):
    """Replaces the place of a value that is no tensor."""


class _Unpickler(pickle.Unpickler):
    #: The index may have values that are no tensors.
    with_objects = False

    def find_class(self, module: str, name: str) -> Any:
        if self.with_objects and (module, name) == (_METADATA, "BytesStorageMetadata"):
            return _Object
        if (module, name) == ("torch", "Size"):
            return tuple
        if module == "torch" and isinstance(dtype := getattr(torch, name, None), torch.dtype):
            return dtype
        if (module, name) in _KNOWN:
            return _Record
        raise ValueError(
            f"it names {module}.{name}, which no index of a checkpoint of tensors does"
        )


def read_index(data: bytes, manifest: Manifest) -> Metadata:
    """Return DCP's index in `data`, which must fit the manifest. Raises ValueError with the
    reason.
    """
    tensors, storage = parse_index(data, manifest.files)
    described = {}
    for name, tensor in tensors.items():
        described[name] = [dtype_name(tensor.properties.dtype), list(tensor.size)]
    if described != manifest.tensors:
        raise ValueError("its tensors are not those of the manifest")
    return Metadata(cast(Any, tensors), storage_data=storage)


def parse_index(
    data: bytes, files: Mapping[str, int], with_objects: bool = False
) -> tuple[dict[str, TensorStorageMetadata], dict[MetadataIndex, _StorageInfo]]:
    """Return the tensors that an index tells of, and where their pieces lie. files: with sizes.

    with_objects: leave out values that are no tensors. Raises ValueError with the reason.
    """
    unpickler = _Unpickler(io.BytesIO(data))
    unpickler.with_objects = with_objects
    try:
        content = unpickler.load().state
        tensors = {}
        for name, record in content["state_dict_metadata"].items():
            if not isinstance(record, _Object):
                tensors[name] = _tensor(record.state)
        storage = {}
        for key, entry in content["storage_data"].items():
            if not with_objects or key.state["fqn"] in tensors:
                index, place = _place(key.state, entry.state, files)
                storage[index] = place
    except ValueError:
        raise
    except Exception as error:
        # A pickle can go wrong in any way.
        raise ValueError(f"it is no index of torch.distributed.checkpoint: {error!r}") from None
    return tensors, storage


def _tensor(state: dict[str, Any]) -> TensorStorageMetadata:
    chunks = []
    for piece in state["chunks"]:
        offsets = _size(piece.state["offsets"])
        chunks.append(ChunkStorageMetadata(offsets, _size(piece.state["sizes"])))
    properties = TensorProperties(state["properties"].state[0])
    return TensorStorageMetadata(properties, _size(state["size"]), chunks)


def _place(
    key: dict[str, Any], entry: dict[str, Any], files: Mapping[str, int]
) -> tuple[MetadataIndex, _StorageInfo]:
    """Return where one piece of a tensor lies."""
    file, start, length = entry["relative_path"], entry["offset"], entry["length"]
    if not isinstance(file, str) or file not in files:
        raise ValueError(f"it names the file {file!r}, which is not in the manifest")
    are_numbers = type(start) is int and type(length) is int
    if not are_numbers or not 0 <= start <= start + length <= files[file]:
        raise ValueError(f"its place of {key['fqn']!r} lies outside of {file}")
    if entry.get("transform_descriptors"):
        raise ValueError(f"{key['fqn']!r} is transformed, which no checkpoint here is")
    index = MetadataIndex(key["fqn"], _size(key["offset"]), key.get("index"))
    return index, _StorageInfo(file, start, length)


def _size(value: Any) -> torch.Size:
    if not isinstance(value, tuple) or any(type(size) is not int or size < 0 for size in value):
        raise ValueError(f"{value!r} is no shape")
    return torch.Size(value)
