"""Write weights as a folder of Hugging Face's: safetensors files, index, configs and the files of
the tokenizer.

All ranks share the work: each file has an owner among the ranks that hold its tensors. The ranks
gather one tensor at a time, and the owner of its file writes that in a thread, when it has all of
them. So a rank has at most one file in memory, and one whole tensor.

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
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from titanlite.checkpoint.errors import CheckpointError
from titanlite.checkpoint.foreign_weights import total_bytes
from titanlite.checkpoint.hf_files import HF_CONFIG, HF_INDEX, HF_SINGLE
from titanlite.checkpoint.loaded import EXPERT_BIAS, WEIGHT
from titanlite.checkpoint.manifest import PARTIAL
from titanlite.checkpoint.state_dict import Save
from titanlite.checkpoint.store_paths import (
    AnyPath,
    StorePath,
    files_in,
    remove_folder,
    sync_folder,
)
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

    holders: our name → ranks that hold a part of the tensor.
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


def write_files(
    folder: AnyPath, files: Sequence[File], read: Callable[[str], torch.Tensor], rank: int = 0
) -> str:
    """Write this rank's part of the files; return what went wrong, or "".

    read: our name → the whole tensor on the CPU; all holders of a tensor call it together. After an
    error the rank still gathers, because the others wait for it.
    """
    problem = ""
    writing: Future[None] | None = None
    with ThreadPoolExecutor(1, thread_name_prefix="titanlite-hf") as pool:
        for file in files:
            if rank not in file.holders:
                continue
            is_own = file.owner == rank
            if is_own:
                problem = problem or _failure(writing)
            tensors: dict[str, torch.Tensor] = {}
            for ours, theirs in file.names.items():
                note_progress("save")
                tensor = read(ours)
                if not is_own or problem:
                    continue
                if isinstance(theirs, str):
                    tensors[theirs] = tensor.contiguous()
                    continue
                rows = tensor.shape[1] // parts_of_entry(theirs)
                parts = tensor.reshape(-1, rows, *tensor.shape[2:])
                for name, part in zip(as_names(theirs), parts, strict=True):
                    tensors[name] = part.clone()
            if tensors:
                writing = pool.submit(_write, folder / file.name, tensors)
    return problem or _failure(writing)


def _write(path: AnyPath, tensors: dict[str, torch.Tensor]) -> None:
    from safetensors.torch import save, save_file

    # Without the format, `transformers` 4 refuses the file.
    about = {"format": "pt"}
    if isinstance(path, Path):
        # safetensors' own files are for their user alone.
        path.touch()
        mode = path.stat().st_mode
        save_file(tensors, path, about)
        path.chmod(mode)
        with open(path, "rb") as stream:
            sync(stream)
    else:
        path.write_bytes(save(tensors, about))


def _failure(writing: Future[None] | None) -> str:
    error = writing.exception() if writing is not None else None
    if error is None:
        return ""
    return str(error) if isinstance(error, OSError) else repr(error)


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """Return a whole tensor on the CPU; all holders of a DTensor call it together."""
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
        where: dict[str, str] = {}
        for file in files:
            for theirs in file.names.values():
                where |= dict.fromkeys(as_names(theirs), file.name)
        total = {"total_size": sum(file.size for file in files)}
        index = {"metadata": total, "weight_map": dict(sorted(where.items()))}
        content[HF_INDEX] = as_json(index)
    about = dict(config)
    ids = json.loads(beside.get(GENERATION, b"{}"))
    for name in ("bos_token_id", "eos_token_id"):
        if name in ids:
            about[name] = ids[name]
    # Biases of experts do not count for the type of the weights.
    names = [name for file in files for name in file.names if not name.endswith(EXPERT_BIAS)]
    types = {entries[name][0] for name in names}
    if len(types) == 1:
        # The latter for `transformers` 4.
        about["dtype"] = about["torch_dtype"] = types.pop()
    content[HF_CONFIG] = as_json(about)
    for name, data in content.items():
        path = folder / name
        path.write_bytes(data)
        if isinstance(path, Path):
            with open(path, "rb") as stream:
                sync(stream)


def as_json(content: Mapping[str, Any]) -> bytes:
    """Return JSON, indented as Hugging Face's is."""
    return (json.dumps(content, indent=2) + "\n").encode()


def begin_folder(final: AnyPath) -> AnyPath:
    """Return the folder to write into: beside the final one, or in a store the final one itself.

    In a store config.json, which is written last, makes it a folder of weights. Raises
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
    """Yield a folder that gets its name after the block, and is gone when the block raises.

    Raises CheckpointError when `final` is there.
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


def save_hf(
    save: Save,
    model: tuple[ModelSpec, Any],
    tokenizer_files: Callable[[], Mapping[str, bytes]],
    group: dist.ProcessGroup,
    on_rank_0: Callable[[Callable[[], Any]], Any],
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Write a sharded model to a new folder; all ranks call it together.

    Raises CheckpointError, on all ranks; then there is no such folder.
    """
    final = save.folder
    spec, args = model
    entries = {name.removeprefix(WEIGHT): one for name, one in save.draft.tensors.items()}
    tensors = {name.removeprefix(WEIGHT): one for name, one in save.tensors.items()}
    rank = dist.get_rank(group)
    aside: AnyPath = on_rank_0(lambda: begin_folder(final))
    try:
        names = spec.hf_names(args)
        sets = gather_objects(set(tensors), group)
        holders = {}
        for name in names:
            holders[name] = tuple(rank for rank, one in enumerate(sets) if name in one)
        files = plan_files(names, entries, holders, shard_bytes)
        problem = write_files(aside, files, lambda name: whole(tensors[name]), rank)
        problems = gather_objects(problem and f"rank {rank}: {problem}", group)
        if any(problems):
            raise CheckpointError(f"saving {final} failed: {'; '.join(filter(None, problems))}")

        def finish() -> None:
            write_configs(aside, spec.hf_config(args), files, entries, tokenizer_files())
            publish_folder(aside, final)

        on_rank_0(finish)
    except BaseException:
        if rank == 0 and aside != final:
            with contextlib.suppress(OSError):
                remove_folder(aside)
        raise
