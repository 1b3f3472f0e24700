"""Write weights as a folder of Hugging Face's: safetensors files, index, configs and the files of
the tokenizer.

All ranks share the work: each file has an owner among the ranks that hold its tensors. The ranks
gather one tensor at a time, and its owner writes it in a thread. So a rank has at most two whole
tensors in memory.

torch's HuggingFaceStorageWriter (2.13) is no replacement. Each rank writes its own file, and rank 0
alone joins them: twice the time, twice the disk. It syncs no joined file, and takes the URL of a
store for a folder. A stack of experts has one name there. docs/log.md has the measurements.
"""

from __future__ import annotations

import contextlib
import json
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, cast

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from titanlite.checkpoint.errors import CheckpointError
from titanlite.checkpoint.hf_files import HF_CONFIG, HF_INDEX, HF_SINGLE
from titanlite.checkpoint.loaded import EXPERT_BIAS
from titanlite.checkpoint.manifest import PARTIAL
from titanlite.checkpoint.paths import AnyPath, StorePath, files_in, remove_folder, sync_folder
from titanlite.checkpoint.safetensors_header import header
from titanlite.checkpoint.weights import total_bytes
from titanlite.dist.dist_env import gather_objects
from titanlite.models.hf_names import HFName, as_names, parts_of_entry
from titanlite.models.spec import ModelSpec
from titanlite.utils import note_progress, sync

#: Bytes of tensors in one file, unless one tensor is larger.
SHARD_BYTES = 4 << 30
GENERATION = "generation_config.json"
#: Our name → [dtype, shape].
Entries = Mapping[str, Sequence[Any]]


@dataclass
class File:
    """One safetensors file: the tensors of ours in it, and the rank that writes it."""

    owner: int
    holders: tuple[int, ...]
    size: int = 0
    #: Our name → Hugging Face's.
    names: dict[str, HFName] = field(default_factory=dict)
    name: str = ""


def plan_files(
    names: Mapping[str, HFName],
    entries: Entries,
    holders: Mapping[str, tuple[int, ...]],
    shard_bytes: int = SHARD_BYTES,
) -> list[File]:
    """Return the files in the order of the names.

    holders: our name → the ranks that hold a part of the tensor.
    """
    files: list[File] = []
    for ours, theirs in names.items():
        size = total_bytes({ours: entries[ours]})
        ranks = holders[ours]
        if not files or files[-1].holders != ranks or files[-1].size + size > shard_bytes:
            # The ranks that hold the tensors own the files in turns.
            turn = sum(file.holders == ranks for file in files)
            files.append(File(ranks[turn % len(ranks)], ranks))
        files[-1].names[ours] = theirs
        files[-1].size += size
    for index, file in enumerate(files, start=1):
        file.name = f"model-{index:05}-of-{len(files):05}.safetensors"
    if len(files) == 1:
        files[0].name = HF_SINGLE
    return files


class FileWriter:
    """Writes the header of a safetensors file, then the tensors one by one, in the order of the
    header.
    """

    def __init__(self, path: AnyPath, file: File, entries: Entries) -> None:
        self._stack = contextlib.ExitStack()
        self._stream: BinaryIO = self._stack.enter_context(path.open("wb"))
        self._left = len(file.names)
        self._is_local = isinstance(path, Path)
        self._stream.write(header(_tensors_of(file, entries)))

    def write(self, tensor: torch.Tensor) -> None:
        """Write the next tensor [whole, on the CPU]; a stack is its tensors in order.

        The last one closes the file.
        """
        self._stream.write(tensor.contiguous().view(-1).view(torch.uint8).numpy().data)
        self._left -= 1
        if not self._left:
            if self._is_local:
                sync(self._stream)
            self.close()

    def close(self) -> None:
        self._stack.close()


def _tensors_of(file: File, entries: Entries) -> Iterator[tuple[str, str, Sequence[int], int]]:
    """Yield name, type, shape and bytes of each tensor of a file."""
    for ours, theirs in file.names.items():
        dtype, shape = entries[ours][:2]
        if not isinstance(theirs, str):
            shape = [shape[1] // parts_of_entry(theirs), *shape[2:]]
        for name in as_names(theirs):
            yield name, dtype, shape, total_bytes({name: [dtype, shape]})


def write_files(
    folder: AnyPath,
    files: Sequence[File],
    entries: Entries,
    read: Callable[[str], torch.Tensor],
    rank: int = 0,
) -> str:
    """Write this rank's part of the files; return what went wrong, "" if nothing did.

    read: our name → the whole tensor on the CPU; all holders of a tensor call it at the same time.
    After an error the rank still gathers, because the others wait for it.
    """
    problem = ""
    writing: Future[None] | None = None
    writers: dict[str, FileWriter] = {}

    def write(file: File, tensor: torch.Tensor) -> None:
        if file.name not in writers:
            writers[file.name] = FileWriter(folder / file.name, file, entries)
        writers[file.name].write(tensor)

    try:
        with ThreadPoolExecutor(1, thread_name_prefix="titanlite-hf") as pool:
            for file, ours in _interleaved([file for file in files if rank in file.holders]):
                note_progress("save")
                tensor = read(ours)
                problem = problem or _failure(writing)
                writing = None
                if file.owner == rank and not problem:
                    writing = pool.submit(write, file, tensor)
                del tensor
        return problem or _failure(writing)
    finally:
        for writer in writers.values():
            # The disk may be full.
            with contextlib.suppress(OSError):
                writer.close()


def _failure(writing: Future[None] | None) -> str:
    error = writing.exception() if writing is not None else None
    if error is None:
        return ""
    return str(error) if isinstance(error, OSError) else repr(error)


def _interleaved(files: Sequence[File]) -> Iterator[tuple[File, str]]:
    """Yield the tensors of as many files at a time as there are owners.

    Tensors come in turns, so that all owners write at once.
    """
    wide = len({file.owner for file in files}) or 1
    for start in range(0, len(files), wide):
        group = [(file, list(file.names)) for file in files[start : start + wide]]
        for place in range(max(len(names) for _, names in group)):
            for file, names in group:
                if place < len(names):
                    yield file, names[place]


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor as a whole on the CPU.

    All ranks that hold a part of a DTensor call it together.
    """
    if isinstance(tensor, DTensor):
        device = tensor.device_mesh.device_type
        if tensor.device.type != device:
            # It is offloaded.
            tensor = cast(DTensor, tensor.to(device))
        tensor = tensor.full_tensor()
    return tensor.detach().cpu()


def write_configs(
    folder: AnyPath,
    config: Mapping[str, Any],
    files: Sequence[File],
    entries: Entries,
    beside: Mapping[str, bytes],
) -> None:
    """Write the index, the files of the tokenizer (`beside`), and config.json last."""
    content = dict(beside)
    if len(files) > 1:
        content[HF_INDEX] = _index(files)
    content[HF_CONFIG] = as_json({**config, **_ids(beside), **_dtype_entries(files, entries)})
    for name, data in content.items():
        path = folder / name
        path.write_bytes(data)
        if isinstance(path, Path):
            with open(path, "rb") as stream:
                sync(stream)


def _index(files: Sequence[File]) -> bytes:
    """Return the content of the index: which file holds a tensor."""
    where = {}
    for file in files:
        for theirs in file.names.values():
            for name in as_names(theirs):
                where[name] = file.name
    total = {"total_size": sum(file.size for file in files)}
    return as_json({"metadata": total, "weight_map": dict(sorted(where.items()))})


def _ids(beside: Mapping[str, bytes]) -> dict[str, Any]:
    """Return the tokenizer's ids that config.json repeats."""
    ids = json.loads(beside.get(GENERATION, b"{}"))
    return {name: ids[name] for name in ("bos_token_id", "eos_token_id") if name in ids}


def _dtype_entries(files: Sequence[File], entries: Entries) -> dict[str, str]:
    """Return config.json's entries for the type of the weights, if all have one type.

    Biases of experts have their own.
    """
    names = [name for file in files for name in file.names if not name.endswith(EXPERT_BIAS)]
    types = {entries[name][0] for name in names}
    if len(types) != 1:
        return {}
    dtype = types.pop()
    # The latter for `transformers` 4.
    return {"dtype": dtype, "torch_dtype": dtype}


def as_json(content: Mapping[str, Any]) -> bytes:
    """Return the bytes of a JSON file, indented as Hugging Face's are."""
    return (json.dumps(content, indent=2) + "\n").encode()


def begin_folder(final: AnyPath) -> AnyPath:
    """Return the folder to write into: beside the final one, or in a store the final one itself.

    In a store config.json, which is written last, makes the folder one of weights. Raises
    CheckpointError when the final one is there.
    """
    if isinstance(final, StorePath):
        there = files_in(final)
        if HF_CONFIG in there:
            raise CheckpointError(f"{final} is there already; it is not overwritten")
        if there:
            # Remains of a save that was cut short.
            remove_folder(final)
        return final
    refuse_existing(final)
    final.parent.mkdir(parents=True, exist_ok=True)
    aside = final.parent / f"{PARTIAL}{final.name}-{uuid.uuid4().hex[:8]}"
    aside.mkdir()
    return aside


def publish_folder(aside: AnyPath, final: AnyPath) -> None:
    """Give the folder its name. Raises CheckpointError."""
    if isinstance(aside, Path) and isinstance(final, Path):
        sync_folder(aside)
        refuse_existing(final)
        aside.rename(final)
        sync_folder(final.parent)


@contextlib.contextmanager
def new_folder(final: AnyPath) -> Iterator[AnyPath]:
    """Yield a folder to write into, which gets the name `final` after the block; nothing stays when
    the block raises. Raises CheckpointError when the final one is there.
    """
    folder = begin_folder(final)
    try:
        yield folder
        publish_folder(folder, final)
    except BaseException:
        with contextlib.suppress(OSError):
            remove_folder(folder)
        raise


def refuse_existing(path: AnyPath) -> None:
    """Raises CheckpointError when the path exists."""
    if path.exists() or (isinstance(path, Path) and path.is_symlink()):
        raise CheckpointError(f"{path} is there already; it is not overwritten")


@dataclass(frozen=True)
class HFWeights:
    """The weights of a model, as one rank has them."""

    spec: ModelSpec
    args: Any
    #: This rank's tensors, by our names.
    tensors: Mapping[str, torch.Tensor]
    #: Of the tensors of all ranks.
    entries: Entries
    #: Gives name → content of the tokenizer's files.
    beside: Callable[[], Mapping[str, bytes]]


def save_hf(
    final: AnyPath,
    weights: HFWeights,
    group: dist.ProcessGroup,
    on_rank_0: Callable[[Callable[[], Any]], Any],
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Write the weights of a sharded model to the folder `final`; all ranks call it together.

    Raises CheckpointError, on all ranks; then there is no such folder.
    """
    rank = dist.get_rank(group)
    aside: AnyPath = on_rank_0(lambda: begin_folder(final))
    try:
        files = _agree_on_files(weights, group, shard_bytes)
        tensors, entries = weights.tensors, weights.entries
        problem = write_files(aside, files, entries, lambda name: whole(tensors[name]), rank)
        problems = gather_objects(problem and f"rank {rank}: {problem}", group)
        if any(problems):
            raise CheckpointError(f"saving {final} failed: {'; '.join(filter(None, problems))}")

        def finish() -> None:
            config = weights.spec.hf_config(weights.args)
            write_configs(aside, config, files, entries, weights.beside())
            publish_folder(aside, final)

        on_rank_0(finish)
    except BaseException:
        if rank == 0 and aside != final:
            with contextlib.suppress(OSError):
                remove_folder(aside)
        raise


def _agree_on_files(weights: HFWeights, group: dist.ProcessGroup, shard_bytes: int) -> list[File]:
    """Return the files, and who writes them, by the ranks that hold each tensor."""
    sets = gather_objects(set(weights.tensors), group)
    names = weights.spec.hf_names(weights.args)
    holders = {}
    for name in names:
        holders[name] = tuple(rank for rank, one in enumerate(sets) if name in one)
    return plan_files(names, weights.entries, holders, shard_bytes)
