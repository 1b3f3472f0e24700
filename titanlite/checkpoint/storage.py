"""How `torch.distributed.checkpoint` reaches files: hashed as they are written, checked before they are unpickled."""

from __future__ import annotations

import io
import os
import pickle
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, cast

from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from titanlite.checkpoint.integrity import ALGORITHM, FAST, algorithm_of, digest_of, mismatch, new_hash
from titanlite.checkpoint.manifest import CheckpointError, Manifest

#: DCP's index of which tensor lies where; a pickle.
INDEX = ".metadata"


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
        #: The index is unpickled: whoever compares it wants to be certain of more than a sound disk.
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
        except OSError as error:
            self.failure = OSError(error.errno, error.strerror, self._path)
            raise self.failure from None

    def written(self) -> Written:
        return Written(self._size, f"{self._algorithm}:{self._hash.hexdigest()}")


class _HashingFileSystem(FileSystem):
    def __init__(self) -> None:
        #: Name in the folder → what was written, of the files of this rank.
        self.written: dict[str, Written] = {}

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Generator[io.IOBase, None, None]:
        if mode != "wb":
            raise ValueError(f"{path} is written once, from its beginning, not opened as {mode!r}")
        with open(path, mode) as stream:
            hashing = _HashingStream(cast(BinaryIO, stream), os.fspath(path))
            try:
                yield cast(io.IOBase, hashing)
            except RuntimeError:
                if hashing.failure is not None:
                    raise hashing.failure from None  # torch.save complains of its position in the file instead
                raise
        self.written[Path(path).name] = hashing.written()

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        super().rename(path, new_path)
        self.written[Path(new_path).name] = self.written.pop(Path(path).name)


class HashingWriter(FileSystemWriter):
    """Each rank hashes what it writes; after `dcp.save`, `written` holds the files of all ranks on rank 0."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, sync_files=True)
        self.written: dict[str, Written] = {}
        self.fs = self._own = _HashingFileSystem()

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        # What a rank returns here DCP brings to rank 0: the hashes travel as one entry more.
        results: list[Any] = [*super().write_data(plan, planner).value(), self._own.written]
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        for result in results:
            self.written.update(cast("dict[str, Written]", result.pop()))
        super().finish(metadata, results)
        self.written.update(self._own.written)


class CheckedReader(FileSystemReader):
    """Reads a checkpoint; its index is compared with the manifest before it is unpickled."""

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        super().__init__(folder)
        self._index = folder / INDEX
        self._expected = manifest.hashes.get(INDEX)
        self._metadata: Metadata | None = None

    def read_metadata(self) -> Metadata:
        """There is no index per rank to ask for. Raises CheckpointError when it is not the one that was written."""
        if self._metadata is None:
            try:
                data = self._index.read_bytes()
            except OSError as error:
                raise CheckpointError(f"{self._index} cannot be read: {error.strerror or error}") from None
            if self._expected is not None:
                found = digest_of(data, algorithm_of(self._expected))
                if found != self._expected:
                    raise CheckpointError(mismatch(self._index, self._expected, found))
            self._metadata = cast(Metadata, pickle.loads(data))
        if getattr(self._metadata, "storage_meta", None) is None:
            self._metadata.storage_meta = StorageMeta()
        assert self._metadata.storage_meta is not None
        self._metadata.storage_meta.load_id = self.load_id
        return self._metadata
