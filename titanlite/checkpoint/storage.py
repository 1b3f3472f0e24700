"""Tensors by name, DCP's files (hashed on writing, checked on reading), and the steps that all
ranks take together.

Files lie in folders or in stores.
"""

from __future__ import annotations

import io
import os
import pickle
import uuid
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple, TypeVar, cast

import torch
import torch.distributed as dist
import torch.distributed.checkpoint.state_dict as state_dicts
from torch import nn
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION, FileSystem
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.distributed_c10d import _set_pg_timeout
from torch.distributed.tensor import DTensor, Shard
from torch.futures import Future
from torch.utils.serialization import config as serialization

from titanlite.checkpoint.dcp_index import read_index
from titanlite.checkpoint.loaded import EXPERT_BIAS
from titanlite.checkpoint.manifest import (
    FAST_HASH,
    INDEX,
    SAFE_HASH,
    CheckpointError,
    Manifest,
    check_files,
    dtype_name,
    new_hash,
    progress,
)
from titanlite.checkpoint.paths import AnyPath, StoreError
from titanlite.dist.dist_env import KEEPS_TIMEOUT, DistEnv, gather_objects, meet
from titanlite.dist.local import local, plain
from titanlite.optim.bad_steps import name_ranks
from titanlite.parallel.own_linear import OwnLinear, weights_replaced
from titanlite.utils import logger, note_progress

if TYPE_CHECKING:
    from titanlite.checkpoint.foreign import WeightsReader

Tensors = dict[str, torch.Tensor]
T = TypeVar("T")
#: Name of the tensor with all ranks' random generators.
RNG = "rng.torch"
#: Entry of a manifest's `config`: `DistEnv.places` of the ranks that had them.
PLACES = "places"
#: Hyper-parameters belong to the configuration, not to the checkpoint.
_HYPERPARAMETERS = "param_groups."
_OPTIONS = state_dicts.StateDictOptions(flatten_optimizer_state_dict=True)


def gather(
    model: nn.Module, optimizer: torch.optim.Optimizer | None = None, frozen: bool = False
) -> Tensors:
    """Return the tensors to save or to load into, by name: `model.…`, and `optimizer.…` unless it
    is None.

    Of a model with adapters these are the adapters alone; frozen: all but those.

    An optimizer without a step first gets the state of a step without gradients, as a target of the
    load.
    """
    found = cast(Tensors, state_dicts.get_model_state_dict(model))
    # float8 wraps weights that are gathered in it; a checkpoint holds plain ones.
    weights = {name: plain(tensor) for name, tensor in found.items()}
    adapters = adapter_names(model)
    if adapters:
        weights = {name: one for name, one in weights.items() if (name in adapters) != frozen}
    tensors = {f"model.{name}": tensor for name, tensor in weights.items()}
    if optimizer is not None:
        for name, value in _optimizer_state(model, optimizer).items():
            tensors[f"optimizer.{name}"] = value
    return tensors


def adapter_names(model: nn.Module) -> set[str]:
    """Return the full names of all adapters' parameters; empty for a model that is trained whole.

    The names are without the parts that wrappers add.
    """
    found = set[str]()
    for name, module in model.named_modules():
        if isinstance(module, OwnLinear):
            found.update(f"{name}.{leaf}" for leaf in module.adapters)
    return found


def _optimizer_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> Tensors:
    fresh = not optimizer.state
    found: dict[str, Any] = state_dicts.get_optimizer_state_dict(model, optimizer, options=_OPTIONS)
    state = {name: value for name, value in found.items() if not name.startswith(_HYPERPARAMETERS)}
    for name, value in state.items():
        if not isinstance(value, torch.Tensor):
            raise TypeError(
                f"{name} of {type(optimizer).__name__} is no tensor, and checkpoints hold tensors "
                "only"
            )
    if fresh:
        # torch makes the state by a step of size zero, which is counted in it.
        for entry in optimizer.state.values():
            for value in entry.values():
                value.zero_()
    return state


def converted(name: str, tensor: torch.Tensor, dtype: str) -> torch.Tensor:
    """Return a tensor in another precision, the same object where it has it already.

    Integers stay, and biases of experts, whose small steps lower precisions lose.
    """
    if name.endswith(EXPERT_BIAS):
        return tensor
    wanted: torch.dtype = getattr(torch, dtype)
    return tensor.to(wanted) if tensor.is_floating_point() else tensor


def scatter(
    tensors: Tensors, model: nn.Module, optimizer: torch.optim.Optimizer | None = None
) -> None:
    """Put loaded tensors (as `gather` names them) into model and optimizer; hyper-parameters stay
    as configured.
    """
    # Of a model with adapters a part.
    options = state_dicts.StateDictOptions(strict=not adapter_names(model))
    state_dicts.set_model_state_dict(model, _strip(tensors, "model."), options=options)
    weights_replaced(model)
    if optimizer is None:
        return
    state: dict[str, Any] = state_dicts.get_optimizer_state_dict(model, optimizer, options=_OPTIONS)
    state.update(_strip(tensors, "optimizer."))
    state_dicts.set_optimizer_state_dict(model, optimizer, state, options=_OPTIONS)


def _strip(tensors: Tensors, prefix: str) -> dict[str, Any]:
    return {name.removeprefix(prefix): t for name, t in tensors.items() if name.startswith(prefix)}


def rng_state(device: torch.device, world_size: int) -> DTensor:
    """Return torch's generators of all ranks, [world_size, bytes] uint8, one row per rank.

    As a sharded tensor each rank writes and reads its own row, and the shape shows another number
    of ranks.
    """
    row = torch.get_rng_state()
    if device.type == "cuda":
        row = torch.cat([row, torch.cuda.get_rng_state(device)])
    mesh = init_device_mesh("cpu", (world_size,))
    return DTensor.from_local(row[None], mesh, [Shard(0)])


def set_rng_state(state: DTensor, device: torch.device) -> None:
    """Give torch's generators the state of this rank. state: [ranks, bytes] uint8, sharded."""
    row = state.to_local()[0]
    size = torch.get_rng_state().numel()
    torch.set_rng_state(row[:size].clone())
    if device.type == "cuda":
        torch.cuda.set_rng_state(row[size:].clone(), device)


@torch.no_grad()
def find_nonfinite(
    tensors: Mapping[str, torch.Tensor], group: dist.ProcessGroup | None = None
) -> str:
    """Return the name of the first tensor with a NaN or an infinity, and the ranks that have one.

    "": no tensor has one.

    All ranks of `group` call it together with their own parts, and get the same answer. Each device
    makes one pass over its tensors and is read once.
    """
    devices: dict[torch.device, dict[str, torch.Tensor]] = {}
    for name, tensor in tensors.items():
        if tensor.is_floating_point():
            part = local(tensor)
            devices.setdefault(part.device, {})[name] = part
    mine = ""
    for parts in devices.values():
        # A sum needs no memory and keeps every NaN and infinity. It may also overflow: then the
        # tensor decides.
        sums = torch.stack([part.sum(dtype=torch.float32) for part in parts.values()])
        finite = sums.isfinite().tolist()
        for (name, part), fine in zip(parts.items(), finite, strict=True):
            if not mine and not fine and not part.isfinite().all():
                mine = name
    names = gather_objects(mine, group)
    ranks = [rank for rank, name in enumerate(names) if name]
    return f"{names[ranks[0]]} on {name_ranks(ranks)}" if ranks else ""


def describe(
    tensors: Mapping[str, torch.Tensor], model: nn.Module | None = None
) -> dict[str, list[Any]]:
    """Return tensor name -> [dtype, global shape], for the manifest.

    model: with a pipeline, the tensors of all its ranks are described; all of them call this
    together.
    """
    mine = {name: [dtype_name(t.dtype), list(t.shape)] for name, t in tensors.items()}
    # The ranks that hold the stages of a pipeline. Of another model each rank has the whole.
    group: dist.ProcessGroup | None = getattr(model, "pipeline_group", None)
    if group is None:
        return mine
    return {name: entry for part in gather_objects(mine, group) for name, entry in part.items()}


class Written(NamedTuple):
    """Size and hash of the bytes that a rank sent to a file; the disk may hold others."""

    size: int
    digest: str
    rank: int = 0


class _HashingStream:
    """A file open for writing that hashes its bytes. DCP only ever appends."""

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
        """For fsync, which is DCP's only use of it.

        DCP does not flush before, so the end would not be synced.
        """
        self.flush()
        return self._stream.fileno()

    def close(self) -> None:
        self._stream.close()

    def written(self) -> Written:
        return Written(self._size, f"{self._algorithm}:{self._hash.hexdigest()}")


class _Files(FileSystem):
    """DCP's file-system interface for folders and stores. DCP takes paths as opaque values."""

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
    """Hashes the files that each rank writes; after `dcp.save`, rank 0 has `written` of all
    ranks.
    """

    def __init__(self, folder: AnyPath) -> None:
        super().__init__(str(folder), sync_files=isinstance(folder, Path))
        #: By name in the folder.
        self.written: dict[str, Written] = {}
        self._files = _Files()
        self.fs = cast(Any, self._files)
        self.path = cast(Any, folder)

    @property
    def checkpoint_id(self) -> str | os.PathLike[str]:
        """DCP pickles it into the index, which must not need our classes."""
        return self.path if isinstance(self.path, Path) else str(self.path)

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Give files in a store new names each time: a client given up may still send its
        requests.
        """
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
        self._write_index(metadata, results)
        # With the index.
        self.written.update(self._files.written)

    def _write_index(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Do the rest of what torch's `finish` does, but write the index under its own name at
        once.

        torch renames it at the end. A store does that by a copy and a deletion, which a run may
        have no right to. The manifest alone makes files a checkpoint, so that the index needs no
        other name before.
        """
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


class CheckedReader(FileSystemReader):
    """Reads a checkpoint whose index must fit the manifest, and is read as data, without running
    any name in it.
    """

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
        """Raises CheckpointError when the index is not the one that was written, or does not fit
        the manifest.
        """
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


# Steps of all ranks together


def new_group(timeout: timedelta) -> dist.ProcessGroup:
    """Make a gloo group of all ranks for agreements around a save; its timeout is never lowered.

    All ranks call it.

    To make it takes no longer than other collectives may: `timeout` holds from then on.
    """
    meet()
    group = dist.new_group(backend="gloo", group_desc=KEEPS_TIMEOUT)
    assert isinstance(group, dist.ProcessGroup)
    _set_pg_timeout(timeout, group)
    return group


def in_words(error: BaseException) -> str:
    """Return an error's message; for one that is not meant for users its class, too."""
    if isinstance(error, (CheckpointError, OSError)):
        return str(error)
    return repr(error)


def on_rank_0(world: DistEnv, action: Callable[[], T], group: dist.ProcessGroup | None = None) -> T:
    """Run on rank 0 only; all ranks of `group` get its result, or its error as a
    CheckpointError.
    """
    result: T | None = None
    problem: str | None = None
    if world.rank == 0:
        try:
            result = action()
        except Exception as error:
            # The other ranks wait for an answer in any case.
            problem = in_words(error)
    answer = [(result, problem)]
    dist.broadcast_object_list(answer, src=0, group=group, device=torch.device("cpu"))
    result, problem = cast("tuple[T, str | None]", answer[0])
    if problem is not None:
        raise CheckpointError(problem)
    return result


def on_each_rank(action: Callable[[], T], group: dist.ProcessGroup) -> T:
    """Run on each rank of `group`; return its result, or raise CheckpointError on all ranks if one
    fails.
    """
    problem = ""
    try:
        result = action()
    except Exception as error:
        # The other ranks wait for an answer in any case.
        problem = str(error) or repr(error)
    problems = gather_objects(problem, group)
    found = [f"rank {rank}: {text}" for rank, text in enumerate(problems) if text]
    if found:
        raise CheckpointError("; ".join(found))
    return result


@contextmanager
def dcp_errors(action: str) -> Iterator[None]:
    """Turn DCP's failures into CheckpointErrors.

    They are a BaseException, which `except Exception` would miss.
    """
    try:
        yield
    except CheckpointException as error:
        causes = set()
        for rank, (cause, _) in error.failures.items():
            causes.add(f"rank {rank}: {in_words(cause)}")
        raise CheckpointError(f"{action} failed: {'; '.join(sorted(causes))}") from error


def share(files: Mapping[str, int], rank: int, ranks: int) -> list[str]:
    """Return the files that this rank reads so that all are read once: about equal bytes each.

    files: name → bytes.
    """
    return sorted(files, key=lambda name: (-files[name], name))[rank::ranks]


def reader_of(writer: int, ranks: int) -> int:
    """Return the rank that reads the files of `writer` back: on another host, if there is one.

    The writer's host may still have in memory what its disk has lost.
    """
    return (writer + ranks // 2) % ranks


def verify_files(
    reader: CheckedReader | WeightsReader,
    names: Sequence[str],
    world: DistEnv,
    group: dist.ProcessGroup | None = None,
    index: bool = True,
) -> str | None:
    """Return the fault of a checkpoint's content, the same on all ranks; None for a good one.

    names: files that this rank compares with their hashes. index: whether it reads the index too.
    group: in which all ranks agree.

    Raises CheckpointError, on all of them, when one of them cannot read: that says nothing of the
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
        # Of the index.
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
