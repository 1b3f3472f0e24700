"""Weights in other formats: `titanlite checkpoint convert`. A few tensors are in memory at a time."""

from __future__ import annotations

import json
import mmap
import os
import shutil
import time
import uuid
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
import torch.distributed.checkpoint as dcp
from torch._subclasses import FakeTensorMode
from torch.distributed.checkpoint import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import MetadataIndex

from titanlite.checkpoint import store
from titanlite.checkpoint.manifest import CheckpointError, Manifest, publish, step_folder, step_of, sync_folder
from titanlite.checkpoint.place import Place, StorePath
from titanlite.checkpoint.sources import (
    HF_CONFIG,
    HF_INDEX,
    HF_SINGLE,
    MODEL,
    STATE,
    STEP,
    Source,
    open_source,
)
from titanlite.checkpoint.state import converted, describe
from titanlite.checkpoint.storage import HashingWriter
from titanlite.models import get_spec
from titanlite.models.shapes import as_record
from titanlite.runs import provenance

Format = Literal["hf", "torch", "checkpoint"]
#: Bytes of tensors in one file of a Hugging Face folder: what is held in memory at a time.
SHARD_BYTES = 2 << 30
#: (bytes done, bytes in all)
Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class _Work:
    """A source with the precision that is wanted of it."""

    source: Source
    dtype: str | None
    progress: Progress

    @property
    def names(self) -> list[str]:
        return list(self.source.shapes)

    def dtype_of(self, name: str) -> torch.dtype:
        there: torch.dtype = getattr(torch, self.source.dtypes[name])
        return getattr(torch, self.dtype) if self.dtype and there.is_floating_point else there

    def bytes_of(self, name: str) -> int:
        return int(torch.Size(self.source.shapes[name]).numel()) * self.dtype_of(name).itemsize

    def read(self, name: str) -> torch.Tensor:
        tensor = self.source.read(name)
        return converted(tensor, self.dtype) if self.dtype else tensor

    def empty(self, name: str) -> torch.Tensor:
        """Without memory; meant for the meta device or fake tensors."""
        return torch.empty(self.source.shapes[name], dtype=self.dtype_of(name))


def convert(
    path: Place,
    target: Place,
    to: Format,
    dtype: str | None = None,
    progress: Progress = lambda done, total: None,
    shard_bytes: int = SHARD_BYTES,
) -> Place:
    """Write the weights in `path` to `target` in another format; returns what was written.

    path: one of our checkpoints (or a folder of them), a Hugging Face folder, or a file that `to = "torch"` wrote.
    target: a folder of Hugging Face's layout, a file for `torch.load`, or a folder of checkpoints in which the new one,
    of weights only, becomes `step-N`; that one may be in a store. It appears under its name when it is whole, and
    nothing there is overwritten.
    dtype: of tensors in floating point, such as "bfloat16"; None: as they are.

    Raises CheckpointError.
    """
    if to == "checkpoint" and step_of(target) is not None:
        raise CheckpointError(f"{target}: name the folder of checkpoints; step-N in it is made")
    if isinstance(target, StorePath):
        return _into_store(path, target, to, dtype, progress)
    if to != "checkpoint" and os.path.lexists(target):
        raise CheckpointError(f"{target} is there already; it is not overwritten")
    work = _Work(open_source(path, progress), dtype, progress)
    final = target / f"step-{work.source.step}" if to == "checkpoint" else target
    if os.path.lexists(final):
        raise CheckpointError(f"{final} is there already; it is not overwritten")
    try:
        final.parent.mkdir(parents=True, exist_ok=True)
        aside = final.parent / f".partial-{final.name}-{uuid.uuid4().hex[:8]}"
        try:
            if to == "hf":
                _write_hf(work, aside, shard_bytes)
                _publish(aside, final)
            elif to == "torch":
                _write_torch(work, aside)
                _publish(aside, final)
            else:
                _write_checkpoint(work, aside, target)
        finally:
            if aside.is_dir():
                shutil.rmtree(aside, ignore_errors=True)
            aside.unlink(missing_ok=True)
    except OSError as error:
        raise CheckpointError(f"{final} cannot be written: {error}") from error
    return final


def _into_store(path: Place, target: StorePath, to: Format, dtype: str | None, progress: Progress) -> Place:
    if to != "checkpoint":
        raise CheckpointError(f"{target}: --to {to} writes to this machine; copy it to the store afterwards")
    work = _Work(open_source(path, progress), dtype, progress)
    final = step_folder(target, work.source.step)
    try:
        for left in store.unfinished(target):
            if store.folder_of(left) == final:
                way = f"`titanlite checkpoint rm --force {left}` deletes it when nothing writes there"
                raise CheckpointError(f"{left} is a save under way or cut short: {way}")
        if final.exists():
            raise CheckpointError(f"{final} is there already; it is not overwritten")
        mark = store.begin(target / final.name)
        try:
            _write_checkpoint(work, final, target)
        except BaseException:
            with suppress(OSError):
                store.delete(mark)
            raise
    except OSError as error:
        raise CheckpointError(f"{final} cannot be written: {error}") from error
    return final


def _publish(aside: Path, final: Path) -> None:
    """Make durable and give the name, which nothing has."""
    for path in [*aside.iterdir()] if aside.is_dir() else [aside]:
        with open(path, "rb") as stream:
            os.fsync(stream.fileno())
    if aside.is_dir():
        sync_folder(aside)
        if os.path.lexists(final):
            raise CheckpointError(f"{final} has appeared meanwhile; it is not overwritten")
        aside.rename(final)
    else:
        os.link(aside, final)  # unlike a rename, it fails where there is a file
    sync_folder(final.parent)


def _write_hf(work: _Work, folder: Path, shard_bytes: int) -> None:
    from safetensors.torch import save_file

    source = work.source
    spec = get_spec(source.family)
    try:
        names = spec.hf_names(source.args)
        config = spec.hf_config(source.args)
    except ValueError as error:
        raise CheckpointError(f"{source.path}: {error}") from None
    if source.kind == "hf":
        config["max_position_embeddings"] = source.args.max_seq_len  # as it says itself
    types = {str(work.dtype_of(name)).removeprefix("torch.") for name in names}
    if len(types) == 1:
        config["dtype"] = config["torch_dtype"] = types.pop()  # the latter for `transformers` 4
    folder.mkdir()
    (folder / HF_CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    mode = (folder / HF_CONFIG).stat().st_mode
    shards = _shards(work, list(names), shard_bytes)
    total = sum(map(work.bytes_of, names))
    where, done = {}, 0
    for index, shard in enumerate(shards, start=1):
        file = HF_SINGLE if len(shards) == 1 else f"model-{index:05}-of-{len(shards):05}.safetensors"
        tensors = {}
        for name in shard:
            tensors[names[name]] = work.read(name).contiguous()
            where[names[name]] = file
            done += work.bytes_of(name)
            work.progress(done, total)
        save_file(tensors, folder / file, metadata={"format": "pt"})  # without it `transformers` refuses the file
        (folder / file).chmod(mode)  # safetensors lets nobody else read it
    if len(shards) > 1:
        index_of = {"metadata": {"total_size": total}, "weight_map": dict(sorted(where.items()))}
        (folder / HF_INDEX).write_text(json.dumps(index_of, indent=2) + "\n", encoding="utf-8")


def _shards(work: _Work, names: Sequence[str], shard_bytes: int) -> list[list[str]]:
    """The names in order, in runs of at most so many bytes, or of one tensor."""
    shards: list[list[str]] = []
    room = 0
    for name in names:
        size = work.bytes_of(name)
        if size > room or not shards:
            shards.append([])
            room = shard_bytes
        shards[-1].append(name)
        room -= size
    return shards


def _write_torch(work: _Work, file: Path) -> None:
    """The file's layout first, without contents; then the tensors, one by one, into the file mapped to memory."""
    source = work.source
    with FakeTensorMode():
        state = {name: work.empty(name) for name in work.names}
        if source.args.tied:
            state["output.weight"] = state["tok_embeddings.weight"]  # one storage, as in the model
    content = {STATE: state, MODEL: as_record(source.family, source.args), STEP: source.step}
    # As a stream: torch refuses to open a file whose name begins with a dot.
    with torch.serialization.skip_data(materialize_fake_tensors=True), open(file, "wb") as stream:
        torch.save(content, stream)
    with torch.serialization.set_default_mmap_options(mmap.MAP_SHARED):  # the file can be written through its tensors
        there: Mapping[str, torch.Tensor] = torch.load(file, map_location="cpu", mmap=True, weights_only=True)[STATE]
    total, done = sum(map(work.bytes_of, work.names)), 0
    for name in work.names:
        if not (source.args.tied and name == "output.weight"):
            there[name].copy_(work.read(name))
        done += work.bytes_of(name)
        work.progress(done, total)


class _OneByOne(DefaultSavePlanner):
    """Asks for each tensor when it is to be written; the state dictionary has them without memory.

    DCP holds on to every tensor until the file is closed. So the memory of each is taken back when the next is asked
    for: it is written by then.
    """

    def __init__(self, read: Callable[[str], torch.Tensor]) -> None:
        super().__init__()
        self._read = read
        self._written: torch.Tensor | None = None

    def lookup_object(self, index: MetadataIndex) -> torch.Tensor:
        if self._written is not None:
            self._written.untyped_storage().resize_(0)
        self._written = self._read(index.fqn).clone()  # what is read may be a part of a file in memory
        return self._written


def _write_checkpoint(work: _Work, partial: Place, root: Place) -> None:
    source, started = work.source, time.perf_counter()
    partial.mkdir()
    with torch.device("meta"):
        state = {f"model.{name}": work.empty(name) for name in work.names}
    total, done = sum(map(work.bytes_of, work.names)), 0

    def read(name: str) -> torch.Tensor:
        nonlocal done
        short = name.removeprefix("model.")
        done += work.bytes_of(short)
        work.progress(done, total)
        return work.read(short)

    writer = HashingWriter(partial)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*torch.distributed is disabled.*")
        dcp.save(state, storage_writer=writer, planner=_OneByOne(read), no_dist=True)
    before = source.manifest
    manifest = Manifest(
        step=source.step,
        fingerprints=before.fingerprints if before else {},
        tensors=describe(state),
        files={name: written.size for name, written in writer.written.items()},
        hashes={name: written.digest for name, written in writer.written.items()},
        train=before.train if before else {},
        versions=provenance.versions(),
        world_size=1,
        created=time.time(),
        config={**(before.config if before else {}), "model": as_record(source.family, source.args)},
        validation_loss=None,
        weights_only=True,
        dtype=work.dtype or "",
        seconds=round(time.perf_counter() - started, 3),
    )
    publish(partial, root, manifest)
