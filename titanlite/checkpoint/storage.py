"""How `torch.distributed.checkpoint` reaches files: hashed as they are written, checked before they are read."""

from __future__ import annotations

import functools
import io
import os
import uuid
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, cast

import torch
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.filesystem import FileSystemBase, _StorageInfo
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

from titanlite.checkpoint.index import INDEX, Index, read_index
from titanlite.checkpoint.integrity import ALGORITHM, FAST, algorithm_of, digest_of, mismatch, new_hash
from titanlite.checkpoint.manifest import CheckpointError, Manifest
from titanlite.checkpoint.place import Place, StoreError, StorePath

#: Objects of a store whose latest bytes are kept while others are read.
_READERS = 4


class Written(NamedTuple):
    """What went into a file, whatever the disk made of it."""

    size: int
    digest: str


class _HashingStream:
    """A file open for writing whose bytes are hashed on their way. DCP only ever appends."""

    def __init__(self, stream: BinaryIO, path: str) -> None:
        self._stream = stream
        self._path = path
        #: What the disk said when it took no more.
        self.failure: OSError | None = None
        #: The index decides how the rest is read: its hash is to hold against more than a bad disk.
        self._algorithm = ALGORITHM if Path(path).name.startswith(INDEX) else FAST
        self._hash = new_hash(self._algorithm)
        self._size = 0

    def write(self, data: bytes | memoryview) -> int:
        self._hash.update(data)
        self._size += memoryview(data).nbytes
        with self._named():
            return self._stream.write(data)

    def tell(self) -> int:
        return self._size

    def flush(self) -> None:
        with self._named():
            self._stream.flush()

    def fileno(self) -> int:
        """For fsync: DCP asks for nothing else. It does not flush before, so the end of a file would not be synced."""
        self.flush()
        return self._stream.fileno()

    def close(self) -> None:
        with self._named():
            self._stream.close()

    @contextmanager
    def _named(self) -> Generator[None, None, None]:
        """Errors of writing do not say which file it was."""
        try:
            yield
        except StoreError as error:
            self.failure = error
            raise
        except OSError as error:
            self.failure = OSError(error.errno, error.strerror, self._path)
            raise self.failure from None

    def written(self) -> Written:
        return Written(self._size, f"{self._algorithm}:{self._hash.hexdigest()}")


class _Files(FileSystemBase):
    """What DCP asks of files, of a folder or a store alike. DCP takes a place for what it can give back alone."""

    def __init__(self) -> None:
        #: What was fetched ahead serves the next tensor, too, where tensors are read one by one.
        self._readers = functools.lru_cache(_READERS)(StorePath.reader)

    @contextmanager
    def create_stream(self, path: Any, mode: str) -> Generator[io.IOBase, None, None]:
        if isinstance(path, StorePath) and mode == "rb":
            yield self._readers(path)
            return
        with path.open(mode) as stream:
            yield stream

    def concat_path(self, path: Any, suffix: str) -> Any:
        return path / suffix

    def init_path(self, path: Any) -> Any:
        return path

    def rename(self, path: Any, new_path: Any) -> None:
        path.rename(new_path)

    def mkdir(self, path: Any) -> None:
        path.mkdir(parents=True, exist_ok=True)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return True

    def exists(self, path: Any) -> bool:
        return bool(path.exists())

    def rm_file(self, path: Any) -> None:
        path.unlink()


class _HashingFiles(_Files):
    def __init__(self) -> None:
        super().__init__()
        #: Name in the folder → what was written, of the files of this rank.
        self.written: dict[str, Written] = {}

    @contextmanager
    def create_stream(self, path: Any, mode: str) -> Generator[io.IOBase, None, None]:
        if mode != "wb":
            raise ValueError(f"{path} is written once, from its beginning, not opened as {mode!r}")
        with path.open(mode) as stream:
            hashing = _HashingStream(cast(BinaryIO, stream), str(path))
            try:
                yield cast(io.IOBase, hashing)
            except RuntimeError:
                if hashing.failure is not None:
                    raise hashing.failure from None  # torch.save complains of its position in the file instead
                raise
        self.written[path.name] = hashing.written()

    def rename(self, path: Any, new_path: Any) -> None:
        super().rename(path, new_path)
        self.written[new_path.name] = self.written.pop(path.name)


class HashingWriter(FileSystemWriter):
    """Each rank hashes what it writes; after `dcp.save`, `written` and `writers` hold all ranks' files on rank 0."""

    def __init__(self, folder: Place) -> None:
        super().__init__(str(folder), sync_files=isinstance(folder, Path))
        self.written: dict[str, Written] = {}
        #: Name in the folder → rank, on rank 0 alike.
        self.writers: dict[str, int] = {}
        self._own = _HashingFiles()
        self.fs = cast(Any, self._own)
        self.path = cast(Any, folder)

    @property
    def checkpoint_id(self) -> str | os.PathLike[str]:
        """It is pickled into the index, which nothing of ours may be needed to read."""
        return self.path if isinstance(self.path, Path) else str(self.path)

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """In a store other names each time: a client given up may still send what it had begun."""
        plans = super().prepare_global_plan(plans)
        if isinstance(self.path, Path):
            return plans
        attempt = uuid.uuid4().hex[:8]
        return [
            replace(p, storage_data=replace(p.storage_data, prefix=f"{p.storage_data.prefix}{attempt}_")) for p in plans
        ]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        # Each file has a hash; torch's own checksums within it were a third of a save's computing.
        with cast(Any, serialization).patch("save.compute_crc32", False):
            results: list[Any] = super().write_data(plan, planner).value()
        # What a rank returns here DCP brings to rank 0: the hashes travel as one entry more.
        results = [*results, self._own.written]
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        for rank, result in enumerate(results):
            written = cast("dict[str, Written]", result.pop())
            self.written.update(written)
            self.writers.update(dict.fromkeys(written, rank))
        super().finish(metadata, results)
        self.written.update(self._own.written)
        self.writers.update(dict.fromkeys(self._own.written, 0))


class CheckedReader(FileSystemReader):
    """Reads a checkpoint; its index is compared with the manifest and read as data, without running what it names."""

    def __init__(self, folder: Place, manifest: Manifest) -> None:
        super().__init__(str(folder))
        self.fs = cast(Any, _Files())
        self.path = cast(Any, folder)
        self._index = folder / INDEX
        self._manifest = manifest
        self._metadata: Metadata | None = None

    def _slice_file(self, file: Any, sinfo: Any) -> Any:
        """From a store a tensor's bytes at once: torch begins to read at their end."""
        if isinstance(self.path, Path):
            return super()._slice_file(file, sinfo)
        file.seek(sinfo.offset)
        return io.BytesIO(file.read(sinfo.length))

    def read_metadata(self) -> Metadata:
        """There is no index per rank to ask for. Raises CheckpointError when it is not the one that was written."""
        if self._metadata is None:
            if INDEX not in self._manifest.files:
                raise CheckpointError(f"{self._index} is not in the manifest")
            try:
                data = self._index.read_bytes()
            except OSError as error:
                raise CheckpointError(f"{self._index} cannot be read: {error.strerror or error}") from None
            expected = self._manifest.hashes.get(INDEX)
            if expected is not None and (found := digest_of(data, algorithm_of(expected))) != expected:
                raise CheckpointError(mismatch(self._index, expected, found))
            try:
                self._metadata = _metadata(read_index(data, self._manifest))
            except ValueError as error:
                raise CheckpointError(f"{self._index} cannot be used: {error}") from None
        self._metadata.storage_meta = StorageMeta(load_id=self.load_id)
        return self._metadata


def _metadata(index: Index) -> Metadata:
    """The index as DCP wants it. Raises ValueError for a type that torch does not have."""
    dtypes = {tensor.dtype: getattr(torch, tensor.dtype, None) for tensor in index.tensors.values()}
    for name, dtype in dtypes.items():
        if not isinstance(dtype, torch.dtype):
            raise ValueError(f"torch has no type {name}")
    tensors: dict[str, Any] = {
        name: TensorStorageMetadata(
            TensorProperties(cast(torch.dtype, dtypes[tensor.dtype])),
            torch.Size(tensor.shape),
            [ChunkStorageMetadata(torch.Size(offset), torch.Size(shape)) for offset, shape in tensor.chunks],
        )
        for name, tensor in index.tensors.items()
    }
    places = {MetadataIndex(p.name, p.offset, p.number): _StorageInfo(p.file, p.start, p.length) for p in index.pieces}
    return Metadata(tensors, storage_data=places)
