"""Write weights as a folder of Hugging Face's: safetensors files, index, configs and the files of
the tokenizer.

All ranks share the work: each file has an owner among the ranks that hold its tensors. The ranks
gather one tensor at a time, and its owner writes it in a thread. So a rank has at most two whole
tensors in memory.
"""

from __future__ import annotations

import contextlib
import json
import os
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, cast

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from titanlite.checkpoint.hf import HF_CONFIG, HF_INDEX, HF_SINGLE, total_bytes
from titanlite.checkpoint.manifest import PARTIAL, CheckpointError
from titanlite.checkpoint.paths import AnyPath, StorePath, files_in, remove_folder, sync_folder
from titanlite.models.hf_names import HFName, as_names
from titanlite.models.spec import ModelSpec

#: Bytes of tensors in one file, unless one tensor is larger.
SHARD_BYTES = 4 << 30
GENERATION = "generation_config.json"
_TYPES = {"float64": "F64", "float32": "F32", "bfloat16": "BF16", "float16": "F16"}
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
        size, who = total_bytes({ours: entries[ours]}), holders[ours]
        if not files or files[-1].holders != who or files[-1].size + size > shard_bytes:
            turn = sum(file.holders == who for file in files)
            files.append(File(who[turn % len(who)], who))
        files[-1].names[ours] = theirs
        files[-1].size += size
    for index, file in enumerate(files, start=1):
        file.name = (
            HF_SINGLE if len(files) == 1 else f"model-{index:05}-of-{len(files):05}.safetensors"
        )
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
        header: dict[str, Any] = {
            "__metadata__": {"format": "pt"}
        }  # without it `transformers` refuses the file
        start = 0
        for ours, theirs in file.names.items():
            dtype, shape = entries[ours][:2]
            shape = shape if isinstance(theirs, str) else shape[1:]
            for name in as_names(theirs):
                end = start + total_bytes({name: [dtype, shape]})
                header[name] = {
                    "dtype": _TYPES[dtype],
                    "shape": list(shape),
                    "data_offsets": [start, end],
                }
                start = end
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        self._stream.write(len(text).to_bytes(8, "little") + text)

    def write(self, tensor: torch.Tensor) -> None:
        """Write the next tensor [whole, on the CPU]; a stack is its tensors in order.

        The last one closes the file.
        """
        self._stream.write(tensor.contiguous().view(-1).view(torch.uint8).numpy().data)
        self._left -= 1
        if not self._left:
            if self._is_local:
                self._stream.flush()
                os.fsync(self._stream.fileno())
            self.close()

    def close(self) -> None:
        self._stack.close()


def write_files(
    folder: AnyPath,
    files: Sequence[File],
    entries: Entries,
    read: Callable[[str], torch.Tensor],
    rank: int = 0,
) -> str:
    """Write this rank's part of the files; return what went wrong, "" if nothing did.

    read: our name → the whole tensor on the CPU; all holders of a tensor call it at the same time.
    After an error the rank goes on to gather, because the others wait for it.
    """
    problem, writing = "", None
    writers: dict[str, FileWriter] = {}

    def write(file: File, tensor: torch.Tensor) -> None:
        if file.name not in writers:
            writers[file.name] = FileWriter(folder / file.name, file, entries)
        writers[file.name].write(tensor)

    try:
        with ThreadPoolExecutor(1, thread_name_prefix="titanlite-hf") as pool:
            for file, ours in _interleaved([file for file in files if rank in file.holders]):
                tensor = read(ours)
                problem, writing = problem or _failure(writing), None
                if file.owner == rank and not problem:
                    writing = pool.submit(write, file, tensor)
                del tensor
        return problem or _failure(writing)
    finally:
        for writer in writers.values():
            with contextlib.suppress(OSError):  # the disk may be full
                writer.close()


def _failure(writing: Future[None] | None) -> str:
    error = writing.exception() if writing is not None else None
    return "" if error is None else str(error) if isinstance(error, OSError) else repr(error)


def _interleaved(files: Sequence[File]) -> Iterator[tuple[File, str]]:
    """Yield the tensors of as many files at a time as there are owners, in turns, so that all
    owners write at once.
    """
    wide = len({file.owner for file in files}) or 1
    for start in range(0, len(files), wide):
        group = [(file, list(file.names)) for file in files[start : start + wide]]
        for place in range(max(len(names) for _, names in group)):
            yield from ((file, names[place]) for file, names in group if place < len(names))


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor as a whole on the CPU; all ranks that hold a part of a DTensor call it
    together.
    """
    if isinstance(tensor, DTensor):
        device = tensor.device_mesh.device_type
        there = (
            tensor if tensor.device.type == device else cast(DTensor, tensor.to(device))
        )  # it may be offloaded
        tensor = there.full_tensor()
    return tensor.detach().cpu()


def write_configs(
    folder: AnyPath,
    config: Mapping[str, Any],
    files: Sequence[File],
    entries: Entries,
    beside: Mapping[str, bytes],
) -> None:
    """Write the index, the files of the tokenizer (`beside`), and config.json last."""
    ids = json.loads(beside.get(GENERATION, b"{}"))
    config = {
        **config,
        **{name: ids[name] for name in ("bos_token_id", "eos_token_id") if name in ids},
    }
    types = {entries[name][0] for file in files for name in file.names}
    if len(types) == 1:
        config["dtype"] = config["torch_dtype"] = types.pop()  # the latter for `transformers` 4
    content = dict(beside)
    if len(files) > 1:
        where = {
            name: file.name
            for file in files
            for theirs in file.names.values()
            for name in as_names(theirs)
        }
        total = {"total_size": sum(file.size for file in files)}
        content[HF_INDEX] = as_json({"metadata": total, "weight_map": dict(sorted(where.items()))})
    for name, data in {**content, HF_CONFIG: as_json(config)}.items():
        path = folder / name
        path.write_bytes(data)
        if isinstance(path, Path):
            with open(path, "rb") as stream:
                os.fsync(stream.fileno())


def as_json(content: Mapping[str, Any]) -> bytes:
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
            remove_folder(final)  # remains of a save that was cut short
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


def refuse_existing(path: AnyPath) -> None:
    """Raises CheckpointError when the path exists."""
    if path.exists() or (isinstance(path, Path) and path.is_symlink()):
        raise CheckpointError(f"{path} is there already; it is not overwritten")


def save_hf(
    final: AnyPath,
    spec: ModelSpec,
    args: Any,
    tensors: Mapping[str, torch.Tensor],
    entries: Entries,
    group: dist.ProcessGroup,
    on_rank_0: Callable[[Callable[[], Any]], Any],
    beside: Callable[[], Mapping[str, bytes]],
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Write the weights of a sharded model to the folder `final`; all ranks call it together.

    tensors, entries: this rank's, and the [dtype, shape] of all; by our names. beside: gives the
    tokenizer's files. Raises CheckpointError, on all ranks; then there is no such folder.
    """
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    aside: AnyPath = on_rank_0(lambda: begin_folder(final))
    try:
        held: list[list[str]] = [[] for _ in range(size)]
        dist.all_gather_object(held, list(tensors), group)
        names = spec.hf_names(args)
        sets = [set(one) for one in held]
        holders = {name: tuple(r for r, one in enumerate(sets) if name in one) for name in names}
        files = plan_files(names, entries, holders, shard_bytes)
        problems = [""] * size
        problem = write_files(aside, files, entries, lambda name: whole(tensors[name]), rank)
        dist.all_gather_object(problems, problem and f"rank {rank}: {problem}", group)
        if any(problems):
            raise CheckpointError(f"saving {final} failed: {'; '.join(filter(None, problems))}")

        def finish() -> None:
            write_configs(aside, spec.hf_config(args), files, entries, beside())
            publish_folder(aside, final)

        on_rank_0(finish)
    except BaseException:
        if rank == 0 and aside != final:
            with contextlib.suppress(OSError):
                remove_folder(aside)
        raise
