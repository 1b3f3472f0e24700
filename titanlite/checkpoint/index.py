"""Reads DCP's index of the places of tensors: a pickle, read as data, so no code in it runs. No torch here."""

from __future__ import annotations

import io
import pickle
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from titanlite.checkpoint.manifest import Manifest

INDEX = ".metadata"
Sizes = tuple[int, ...]
_CLASSES = ("Metadata", "TensorStorageMetadata", "TensorProperties", "ChunkStorageMetadata", "MetadataIndex")
#: Names that the index of a checkpoint of tensors holds, besides `torch.Size` and types such as `torch.float32`.
_KNOWN = {
    *(("torch.distributed.checkpoint.metadata", name) for name in (*_CLASSES, "StorageMeta", "_MEM_FORMAT_ENCODING")),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch.serialization", "_get_layout"),
    ("pathlib", "PosixPath"),
    ("pathlib._local", "PosixPath"),  # Python 3.13
    ("builtins", "getattr"),  # members of an enum, as Python 3.11.0 to 3.11.3 writes them; a record here, never called
}
_DTYPE = re.compile(r"(b?float|u?int|complex|bool)\w*")
#: The folder in which format 1 wrote, with a process id at the end. Later formats had eight digits there, or `step-N`.
_OF_FORMAT_1 = re.compile(r"\.partial-step-\d+-\d{1,7}")


class Tensor(NamedTuple):
    dtype: str
    shape: Sizes
    #: Offset and shape of each piece.
    chunks: tuple[tuple[Sizes, Sizes], ...]


class Piece(NamedTuple):
    """The place of one piece of a tensor."""

    name: str
    offset: Sizes
    #: Number of the piece, where DCP has noted it.
    number: int | None
    file: str
    #: First byte in the file, and how many.
    start: int
    length: int


class Index(NamedTuple):
    tensors: dict[str, Tensor]
    pieces: tuple[Piece, ...]


class _Record:
    """Replaces every object in the pickle: holds its arguments and state, and does nothing."""

    arguments: tuple[Any, ...] = ()
    state: Any = None

    def __init__(self, *arguments: Any) -> None:
        self.arguments = arguments

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("torch", "Size"):
            return tuple
        if module == "torch" and _DTYPE.fullmatch(name):
            return name
        if (module, name) in _KNOWN:
            return _Record
        raise ValueError(f"it names {module}.{name}, which no index of a checkpoint of tensors does")


def read_index(data: bytes, manifest: Manifest) -> Index:
    """Return the index in `data`, which must fit the manifest. Raises ValueError with the reason."""
    try:
        content = _Unpickler(io.BytesIO(data)).load().state
        tensors = {name: _tensor(record.state) for name, record in content["state_dict_metadata"].items()}
        pieces = tuple(_pieces(content["storage_data"], manifest.files))
        newer = manifest.format == 1 and not _is_of_format_1(content["storage_meta"].state["checkpoint_id"])
    except ValueError:
        raise
    except Exception as error:  # a pickle can go wrong in any way
        raise ValueError(f"it is no index of torch.distributed.checkpoint: {error!r}") from None
    if {name: [tensor.dtype, list(tensor.shape)] for name, tensor in tensors.items()} != manifest.tensors:
        raise ValueError("its tensors are not those of the manifest")
    if newer:
        raise ValueError("it is newer than format 1, of which its manifest is: the hashes were taken out")
    return Index(tensors, pieces)


def _is_of_format_1(written_in: Any) -> bool:
    """Decide by the folder that a checkpoint was written in, as DCP notes it: a path, or the URL of a store."""
    return isinstance(written_in, _Record) and bool(_OF_FORMAT_1.fullmatch(str(written_in.arguments[-1])))


def _tensor(state: dict[str, Any]) -> Tensor:
    dtype = state["properties"].state[0]
    if not isinstance(dtype, str) or not _DTYPE.fullmatch(dtype):
        raise ValueError(f"{dtype!r} is no type of tensors")
    chunks = tuple((_sizes(c.state["offsets"]), _sizes(c.state["sizes"])) for c in state["chunks"])
    return Tensor(dtype, _sizes(state["size"]), chunks)


def _pieces(entries: dict[_Record, _Record], files: dict[str, int]) -> Iterator[Piece]:
    for key, entry in entries.items():
        name, number = key.state["fqn"], key.state.get("index")
        file, start, length = (entry.state[field] for field in ("relative_path", "offset", "length"))
        if not isinstance(file, str) or file not in files:
            raise ValueError(f"it names the file {file!r}, which is not in the manifest")
        if type(start) is not int or type(length) is not int or not 0 <= start <= start + length <= files[file]:
            raise ValueError(f"its place of {name!r} lies outside of {file}")
        if entry.state.get("transform_descriptors"):
            raise ValueError(f"{name!r} is transformed, which no checkpoint here is")
        yield Piece(name, _sizes(key.state["offset"]), number, file, start, length)


def _sizes(value: Any) -> Sizes:
    if not isinstance(value, tuple) or any(type(size) is not int or size < 0 for size in value):
        raise ValueError(f"{value!r} is no shape")
    return value
