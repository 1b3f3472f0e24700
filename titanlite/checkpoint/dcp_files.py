"""The files of a checkpoint, by torch.distributed.checkpoint (DCP): hashed as they are written,
compared when they are read, in folders and in stores.

The index `.metadata` is a pickle that another program may have written, so no code in it may run.
"""

from __future__ import annotations

import io
import os
import pickle
import uuid
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple, cast

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.filesystem import (
    CURRENT_DCP_VERSION,
    FileSystem,
    _StorageInfo,
)
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future
from torch.utils.serialization import config as serialization

from titanlite.checkpoint.errors import CheckpointError
from titanlite.checkpoint.manifest import (
    FAST_HASH,
    INDEX,
    PIN,
    SAFE_HASH,
    Manifest,
    check_files,
    dtype_name,
    new_hash,
    progress,
)
from titanlite.checkpoint.store_paths import AnyPath, StoreError, files_in
from titanlite.dist.dist_env import DistEnv, gather_objects
from titanlite.utils import logger, note_progress

if TYPE_CHECKING:
    from titanlite.checkpoint.foreign_formats import WeightsReader


class Written(NamedTuple):
    """Size and hash of the bytes that a rank sent to a file; the disk may hold others."""

    size: int
    digest: str
    rank: int = 0


class _HashingStream:
    """A file open for writing. DCP only ever appends."""

    def __init__(self, stream: BinaryIO, algorithm: str) -> None:
        self._stream = stream
        self._algorithm = algorithm
        self._hash = new_hash(algorithm)
        self._size = 0
        #: The error of the disk, if there was one.
        self.failure: OSError | None = None

    def write(self, data: bytes | memoryview) -> int:
        self._hash.update(data)
        self._size += memoryview(data).nbytes
        note_progress("save", "end")
        try:
            return self._stream.write(data)
        except OSError as error:
            self.failure = error
            raise

    def tell(self) -> int:
        return self._size

    def flush(self) -> None:
        self._stream.flush()

    def fileno(self) -> int:
        """For fsync: DCP does not flush before it, so the end would not be synced."""
        self.flush()
        return self._stream.fileno()

    def close(self) -> None:
        self._stream.close()

    def written(self) -> Written:
        return Written(self._size, f"{self._algorithm}:{self._hash.hexdigest()}")


class _Files(FileSystem):
    """DCP's file system, for folders and stores."""

    def __init__(self) -> None:
        #: Name in the folder → size and hash, of the files that this rank has written.
        self.written: dict[str, Written] = {}

    @contextmanager
    def create_stream(self, path: Any, mode: str) -> Generator[io.IOBase, None, None]:
        if mode == "rb":
            with path.open(mode) as stream:
                yield stream
            return
        hashing = None
        # The index decides how the rest is read: its hash must hold against more than a bad disk.
        algorithm = SAFE_HASH if path.name == INDEX else FAST_HASH
        try:
            with path.open(mode) as stream:
                hashing = _HashingStream(stream, algorithm)
                yield cast(io.IOBase, hashing)
        except (OSError, RuntimeError) as error:
            # torch.save complains of its position in the file, where the disk was the cause.
            failure = (hashing and hashing.failure) or error
            if isinstance(failure, OSError) and failure.errno is not None:
                # Errors of writing do not name the file.
                failure = OSError(failure.errno, failure.strerror, str(path))
            raise failure from None
        self.written[path.name] = hashing.written()

    def concat_path(self, path: Any, suffix: str) -> Any:
        return path / suffix

    def mkdir(self, path: Any) -> None:
        if isinstance(path, Path):
            path.mkdir(parents=True, exist_ok=True)

    def exists(self, path: Any) -> bool:
        return bool(path.exists())


class HashingWriter(FileSystemWriter):
    """Hashes the files that each rank writes; after `dcp.save`, rank 0 has those of all ranks."""

    def __init__(self, folder: AnyPath) -> None:
        super().__init__(str(folder), sync_files=isinstance(folder, Path))
        self._folder = folder
        #: Files that this rank has written, by their names in the folder.
        self.written: dict[str, Written] = {}
        self._files = _Files()
        self.fs = cast(Any, self._files)
        self.path = cast(Any, folder)

    @property
    def checkpoint_id(self) -> str | os.PathLike[str]:
        """DCP pickles it into the index, which must not need our classes."""
        return self.path if isinstance(self.path, Path) else str(self.path)

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Give files in a store new names: a client given up may still send its requests."""
        plans = super().prepare_global_plan(plans)
        if isinstance(self.path, Path):
            return plans
        attempt = uuid.uuid4().hex[:8]
        renamed = []
        for plan in plans:
            prefix = f"{plan.storage_data.prefix}{attempt}_"
            renamed.append(replace(plan, storage_data=replace(plan.storage_data, prefix=prefix)))
        return renamed

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        # Each file has a hash; torch's own checksums within it were a third of a save's computing.
        with cast(Any, serialization).patch("save.compute_crc32", False):
            results: list[Any] = super().write_data(plan, planner).value()
        # DCP sends a rank's results to rank 0: the hashes travel as one entry more.
        results = [*results, self._files.written]
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        for rank, result in enumerate(results):
            files = cast("dict[str, Written]", result.pop())
            for name, file in files.items():
                self.written[name] = file._replace(rank=rank)
        # As torch does, but the index has its own name at once: torch renames it at the end, for
        # which a store copies and deletes. The manifest alone makes files a checkpoint.
        metadata.version = CURRENT_DCP_VERSION
        metadata.storage_data = {}
        for result in results:
            for one in result:
                metadata.storage_data[one.index] = one.storage_data
        metadata.storage_meta = self.storage_meta()
        with self._files.create_stream(cast(Any, self.path) / INDEX, "wb") as stream:
            pickle.dump(metadata, stream)
            if self.sync_files:
                os.fsync(stream.fileno())
        self.written.update(self._files.written)

    def all_files(self) -> dict[str, Written]:
        """Return on rank 0 what all ranks have written.

        Raises CheckpointError when the folder holds anything else.
        """
        # A user may pin a checkpoint while it is being written.
        there = {name: file.st_size for name, file in files_in(self._folder).items() if name != PIN}
        sent = {name: file.size for name, file in self.written.items()}
        if there != sent:
            names = sorted({*there, *sent})
            wrong = [name for name in names if there.get(name) != sent.get(name)]
            raise CheckpointError(
                f"{self._folder} does not hold what was written to it ({', '.join(wrong[:3])}): do "
                f"all nodes see the same {self._folder.parent}? If not, name a shared folder or an "
                "s3:// URL as checkpoint.folder"
            )
        return self.written


class CheckedReader(FileSystemReader):
    """Reads a checkpoint whose index must fit the manifest, without running any name in it."""

    def __init__(self, folder: AnyPath, manifest: Manifest) -> None:
        super().__init__(str(folder))
        self.fs = cast(Any, _Files())
        self.path = cast(Any, folder)
        self.folder = folder
        self.manifest = manifest
        self._metadata: Metadata | None = None

    def _slice_file(self, file: Any, sinfo: Any) -> Any:
        """From a store, fetch a tensor's bytes at once: torch begins to read at their end."""
        if isinstance(self.path, Path):
            return super()._slice_file(file, sinfo)
        file.seek(sinfo.offset)
        return io.BytesIO(file.read(sinfo.length))

    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        """Raises CheckpointError for an index that has changed or does not fit the manifest."""
        path = self.folder / INDEX
        if self._metadata is None:
            if INDEX not in self.manifest.files:
                raise CheckpointError(f"{path} is not in the manifest")
            if problems := check_files(self.folder, self.manifest, [INDEX]):
                raise CheckpointError(problems[0])
            try:
                self._metadata = read_index(path.read_bytes(), self.manifest)
            except ValueError as error:
                raise CheckpointError(f"{path} cannot be used: {error}") from None
        self._metadata.storage_meta = StorageMeta(load_id=self.load_id)
        return self._metadata


def share(files: Mapping[str, int], rank: int, ranks: int) -> list[str]:
    """Return this rank's files, so that all are read once, about equal bytes each.

    files: name → bytes.
    """
    return sorted(files, key=lambda name: (-files[name], name))[rank::ranks]


def verify_files(
    reader: CheckedReader | WeightsReader,
    names: Sequence[str],
    world: DistEnv,
    group: dist.ProcessGroup | None = None,
    index: bool = True,
) -> str | None:
    """Return the fault of a checkpoint's content, the same on all ranks; None for a good one.

    names: files that this rank hashes. All ranks of `group` call it together.

    Raises CheckpointError, on all of them, when one cannot read: that says nothing of the
    checkpoint.
    """
    problems: list[str] = []
    failure = ""
    try:
        tail = " of this rank's part" if world.size > 1 else ""
        show = progress(logger.info, f"comparing {reader.folder} with its hashes: ", tail)
        problems = check_files(reader.folder, reader.manifest, names, show)
        if index:
            reader.read_metadata()
    except CheckpointError as error:
        # The index is damaged.
        problems = [*problems, str(error)]
    except Exception as error:
        # The others wait for this rank's answer in any case.
        told = error if isinstance(error, StoreError) else f"{reader.folder}: {error!r}"
        failure = f"rank {world.rank} cannot read {told}"
    found = gather_objects((problems, failure), group)
    failures = sorted(text for _, text in found if text)
    if failures:
        raise CheckpointError("; ".join(failures))
    every = sorted({problem for part, _ in found for problem in part})
    if not every:
        return None
    more = f" (and {len(every) - 1} more of its files)" if len(every) > 1 else ""
    return every[0] + more


def with_files(draft: Manifest, written: Mapping[str, Written]) -> Manifest:
    """Add bytes and hash of each file to a manifest."""
    return replace(
        draft,
        files={name: file.size for name, file in written.items()},
        hashes={name: file.digest for name, file in written.items()},
    )


def read_back(
    folder: AnyPath,
    manifest: Manifest,
    written: Mapping[str, Written],
    world: DistEnv,
    group: dist.ProcessGroup,
) -> None:
    """Compare what is in the folder of a save with what was sent to it.

    Each rank reads files of another one, if possible of another host, whose memory may still have
    what its disk has lost. Raises CheckpointError, on all ranks.
    """
    writer = (world.rank - world.size // 2) % world.size
    names = [name for name, file in written.items() if file.rank == writer]
    reader = CheckedReader(folder, manifest)
    problem = verify_files(reader, names, world, group, index=INDEX in names)
    if problem:
        raise CheckpointError(f"what was written could not be read back: {problem}")


# The index

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
    """Return DCP's index in `data`. Raises ValueError if it does not fit the manifest."""
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
    """Return the tensors of an index, and where their pieces lie. Raises ValueError.

    files: name → bytes. with_objects: leave out values that are no tensors.
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
