"""`titanlite checkpoint convert`: weights between checkpoints, Hugging Face folders and files of torch.

A few tensors are in memory at a time.
"""

from __future__ import annotations

import json
import mmap
import os
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed.checkpoint as dcp
from torch._subclasses import FakeTensorMode
from torch.distributed.checkpoint import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import MetadataIndex

from titanlite.checkpoint.load import DTYPE, compare_entries, difference_table
from titanlite.checkpoint.manifest import (
    CheckpointError,
    Manifest,
    Progress,
    check_files,
    step_folder,
    step_of,
)
from titanlite.checkpoint.paths import AnyPath, StorePath, remove_folder, sync_folder
from titanlite.checkpoint.retention import begin, delete, marks_of, publish
from titanlite.checkpoint.storage import HashingWriter, converted, describe
from titanlite.models import get_spec
from titanlite.models.args import as_record, from_record
from titanlite.models.spec import ShapeError
from titanlite.optim.average import AVERAGE, WEIGHT
from titanlite.runs import provenance
from titanlite.tools.checkpoint import checkpoint_of
from titanlite.tools.tensors import Contents, quiet

Format = Literal["hf", "torch", "checkpoint"]
#: Bytes of tensors in one file of a Hugging Face folder, which are in memory at a time.
SHARD_BYTES = 2 << 30
HF_CONFIG, HF_INDEX, HF_SINGLE = "config.json", "model.safetensors.index.json", "model.safetensors"
#: Entries of the dictionary in a file of torch's.
STATE, MODEL, STEP = "state_dict", "model", "step"
_HEAD = "lm_head.weight"
_HF_DTYPES = {"F64": "float64", "F32": "float32", "BF16": "bfloat16", "F16": "float16"}


@dataclass(frozen=True)
class Source:
    """The weights of one model, under our names. `read(name)` returns a whole tensor on the CPU."""

    path: AnyPath
    family: str
    args: Any
    #: Steps that it was trained for; 0: unknown.
    step: int
    #: Name → a tensor of that type and shape on the meta device.
    empty: Mapping[str, torch.Tensor]
    read: Callable[[str], torch.Tensor]
    #: Of a checkpoint.
    manifest: Manifest | None = None
    is_hf: bool = False

    def converted(self, dtype: str | None, progress: Progress) -> Source:
        """Return the same weights in another precision (None: as they are), which report their progress when read."""
        empty = {name: converted(tensor, dtype) if dtype else tensor for name, tensor in self.empty.items()}
        done, total = 0, sum(tensor.nbytes for tensor in empty.values())

        def read(name: str) -> torch.Tensor:
            nonlocal done
            done += empty[name].nbytes
            progress(done, total)
            return self.read(name).to(empty[name].dtype)

        return replace(self, empty=empty, read=read)


def open_source(path: AnyPath, progress: Progress = lambda done, total: None, ema: bool = False) -> Source:
    """Open the weights in `path`; compare every byte of a checkpoint with its hashes first (`progress`).

    ema: those of a checkpoint's average (optimizer.ema_decay).

    Raises CheckpointError when it holds no weights, or others than those of the model that it describes.
    """
    is_hf = (path / HF_CONFIG).is_file()
    if isinstance(path, StorePath):
        if is_hf or path.is_file():
            raise CheckpointError(f"{path}: only checkpoints are read from a store; copy it to this machine first")
        source = _checkpoint(checkpoint_of(path), progress, ema)
    elif is_hf:
        source = _hf_folder(path)
    else:
        source = _torch_file(path) if path.is_file() else _checkpoint(checkpoint_of(path), progress, ema)
    saved = describe(source.empty)
    wanted = describe(get_spec(source.family).build_on_meta(source.args).state_dict())  # a tied head has its own name
    found = {name: compare_entries(saved.get(name), wanted.get(name)) for name in {*saved, *wanted}}
    if found := {name: problem for name, problem in found.items() if problem not in ("", DTYPE)}:
        raise CheckpointError(difference_table(found, saved, wanted, str(path)))
    return source


def _checkpoint(folder: AnyPath, progress: Progress, ema: bool) -> Source:
    contents = Contents(folder)
    manifest = contents.manifest
    record = manifest.config.get("model")
    if not isinstance(record, dict):
        raise CheckpointError(
            f"{folder} does not say which model it is of: it was written before checkpoints did, or by a program that "
            'gave no config = {"model": titanlite.models.spec.as_record(…)}. Resume the run, and convert its next one'
        )
    if problems := check_files(folder, manifest, progress=progress):
        raise CheckpointError("\n  ".join([f"{folder} is damaged:", *problems]))
    family, args = _described(folder, record)
    prefix = AVERAGE if ema else WEIGHT
    tensors = {n.removeprefix(prefix): e for n, e in manifest.tensors.items() if n.startswith(prefix)}
    if not tensors:
        raise CheckpointError(f"{folder} holds no average of the weights: its run had no optimizer.ema_decay")
    empty = {name: _empty(dtype, shape) for name, (dtype, shape) in tensors.items()}
    return Source(folder, family, args, manifest.step, empty, lambda name: contents.read(prefix + name), manifest)


def _empty(dtype: str, shape: Sequence[int]) -> torch.Tensor:
    return torch.empty(shape, dtype=getattr(torch, dtype), device="meta")


def _described(path: AnyPath, record: Mapping[str, Any]) -> tuple[str, Any]:
    try:
        return from_record(record)
    except (ShapeError, TypeError) as error:
        raise CheckpointError(f"{path}: its model cannot be read: {error}") from None


def _hf_folder(folder: Path) -> Source:
    from safetensors import SafetensorError, safe_open

    family = "llama3"  # the models of both families differ in numbers alone
    spec = get_spec(family)
    opened: dict[str, Any] = {}  # their name → the file that holds it
    file = folder / HF_CONFIG
    try:
        args = spec.args_from_hf(json.loads(file.read_text(encoding="utf-8")))
        file = folder
        for file in _hf_files(folder):
            handle = safe_open(file, framework="pt")
            opened.update(dict.fromkeys(handle.keys(), handle))
        file = folder
        names = {ours: theirs for theirs, ours in spec.names_from_hf(opened.keys(), args).items()}
        if args.tied:  # the head is the embedding's tensor, which files hold once
            names["output.weight"] = names["tok_embeddings.weight"]
        slices = {ours: opened[theirs].get_slice(theirs) for ours, theirs in names.items()}
        empty = {name: _empty(_HF_DTYPES[one.get_dtype()], one.get_shape()) for name, one in slices.items()}
    except (OSError, ValueError, TypeError, KeyError, SafetensorError) as error:
        why = f"it lacks {error}, or titanlite does not read that type" if isinstance(error, KeyError) else error
        raise CheckpointError(f"{file} cannot be read: {why}") from None

    def read(name: str) -> torch.Tensor:
        tensor: torch.Tensor = opened[names[name]].get_tensor(names[name])
        return tensor

    if args.tied and _HEAD in opened and not torch.equal(opened[_HEAD].get_tensor(_HEAD), read("output.weight")):
        raise CheckpointError(f"{folder}: {_HEAD} differs from the embedding, but {HF_CONFIG} says that they are tied")
    return Source(folder, family, args, 0, empty, read, is_hf=True)


def _hf_files(folder: Path) -> list[Path]:
    """Raises OSError or ValueError."""
    if (folder / HF_SINGLE).is_file():
        return [folder / HF_SINGLE]
    index = json.loads((folder / HF_INDEX).read_text(encoding="utf-8"))
    names = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(names, dict) or any(Path(str(name)).name != name for name in names.values()):
        raise ValueError(f"{HF_INDEX} has no weight_map of files in this folder")
    return [folder / name for name in sorted({*names.values()})]


def _torch_file(path: Path) -> Source:
    try:
        content = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except Exception as error:  # torch has many ways to refuse a cut file, or a pickle of other things than tensors
        raise CheckpointError(f"{path} is no file of tensors by torch.save: {error}") from None
    state = content.get(STATE) if isinstance(content, dict) else None
    if not isinstance(state, dict) or not isinstance(content.get(MODEL), dict):
        raise CheckpointError(
            f'{path} must hold {{"{STATE}": name → tensor, "{MODEL}": titanlite.models.spec.as_record(…)}}, as '
            "`titanlite checkpoint convert --to torch` writes it"
        )
    family, args = _described(path, content[MODEL])
    tensors = {str(name): tensor for name, tensor in state.items() if isinstance(tensor, torch.Tensor)}
    empty = {name: tensor.to("meta") for name, tensor in tensors.items()}
    return Source(path, family, args, int(content.get(STEP, 0)), empty, tensors.__getitem__)


def convert(
    path: AnyPath,
    target: AnyPath,
    to: Format,
    dtype: str | None = None,
    progress: Progress = lambda done, total: None,
    shard_bytes: int = SHARD_BYTES,
    ema: bool = False,
) -> AnyPath:
    """Write the weights in `path` to `target` in another format; return the written folder or file.

    path: one of our checkpoints (or a folder of them), a Hugging Face folder, or a file that `to = "torch"` wrote.
    target: a folder of Hugging Face's layout, a file for `torch.load`, or a folder of checkpoints in which the new one,
    of weights only, becomes `step-N`; that one may be in a store. It appears when it is whole, and nothing is
    overwritten. dtype: of tensors in floating point, such as "bfloat16"; None: as they are. ema: the average of the
    weights (optimizer.ema_decay), from a checkpoint.

    Raises CheckpointError.
    """
    if to == "checkpoint" and step_of(target) is not None:
        raise CheckpointError(f"{target}: name the folder of checkpoints; step-N in it is made")
    if to != "checkpoint":
        if isinstance(target, StorePath):
            raise CheckpointError(f"{target}: --to {to} writes to this machine; copy it to the store afterwards")
        _refuse_existing(target)
    source = open_source(path, progress, ema).converted(dtype, progress)
    final = step_folder(target, source.step) if to == "checkpoint" else target
    try:
        if to == "checkpoint":
            _write_checkpoint(source, target, dtype)
        elif isinstance(target, Path):
            _write_aside(source, target, to, shard_bytes)
    except OSError as error:
        raise CheckpointError(f"{final} cannot be written: {error}") from error
    return final


def _refuse_existing(path: AnyPath) -> None:
    """Raises CheckpointError when the path exists."""
    if path.exists() or (isinstance(path, Path) and path.is_symlink()):
        raise CheckpointError(f"{path} is there already; it is not overwritten")


def _write_aside(source: Source, final: Path, to: Format, shard_bytes: int) -> None:
    """Write files under another name, make them durable, and give them their own, which nothing has."""
    final.parent.mkdir(parents=True, exist_ok=True)
    aside = final.parent / f".partial-{final.name}-{uuid.uuid4().hex[:8]}"
    try:
        if to == "hf":
            _write_hf(source, aside, shard_bytes)
        else:
            _write_torch(source, aside)
        for path in [*aside.iterdir()] if aside.is_dir() else [aside]:
            with open(path, "rb") as stream:
                os.fsync(stream.fileno())
        if aside.is_dir():
            sync_folder(aside)
            _refuse_existing(final)
            aside.rename(final)
        else:
            os.link(aside, final)  # unlike a rename, it fails where there is a file
        sync_folder(final.parent)
    finally:
        remove_folder(aside) if aside.is_dir() else aside.unlink(missing_ok=True)


def _write_hf(source: Source, folder: Path, shard_bytes: int) -> None:
    from safetensors.torch import save_file

    spec = get_spec(source.family)
    try:
        names = spec.hf_names(source.args)
        config = spec.hf_config(source.args)
    except ValueError as error:
        raise CheckpointError(f"{source.path}: {error}") from None
    if source.is_hf:
        config["max_position_embeddings"] = source.args.max_seq_len  # as it says itself
    types = {entry[0] for entry in describe({name: source.empty[name] for name in names}).values()}
    if len(types) == 1:
        config["dtype"] = config["torch_dtype"] = types.pop()  # the latter for `transformers` 4
    folder.mkdir()
    (folder / HF_CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    mode = (folder / HF_CONFIG).stat().st_mode
    shards = _shards(source, list(names), shard_bytes)
    where: dict[str, str] = {}
    for index, shard in enumerate(shards, start=1):
        file = HF_SINGLE if len(shards) == 1 else f"model-{index:05}-of-{len(shards):05}.safetensors"
        tensors = {names[name]: source.read(name).contiguous() for name in shard}
        where.update(dict.fromkeys(tensors, file))
        save_file(tensors, folder / file, metadata={"format": "pt"})  # without it `transformers` refuses the file
        (folder / file).chmod(mode)  # safetensors lets nobody else read it
    if len(shards) > 1:
        total = sum(source.empty[name].nbytes for name in names)
        content = {"metadata": {"total_size": total}, "weight_map": dict(sorted(where.items()))}
        (folder / HF_INDEX).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _shards(source: Source, names: Sequence[str], shard_bytes: int) -> list[list[str]]:
    """Return the names in order, in groups of at most so many bytes, or of one tensor."""
    shards: list[list[str]] = []
    room = 0
    for name in names:
        size = source.empty[name].nbytes
        if size > room or not shards:
            shards.append([])
            room = shard_bytes
        shards[-1].append(name)
        room -= size
    return shards


def _write_torch(source: Source, file: Path) -> None:
    """Write the file's layout without content; then the tensors, one by one, into the file mapped to memory."""
    names = {*source.empty} - ({"output.weight"} if getattr(source.args, "tied", False) else set())
    with FakeTensorMode():
        state = {name: torch.empty(tensor.shape, dtype=tensor.dtype) for name, tensor in source.empty.items()}
        if len(names) < len(state):
            state["output.weight"] = state["tok_embeddings.weight"]  # one storage, as in the model
    content = {STATE: state, MODEL: as_record(source.family, source.args), STEP: source.step}
    # As a stream: torch refuses to open a file whose name begins with a dot.
    with torch.serialization.skip_data(materialize_fake_tensors=True), open(file, "wb") as stream:
        torch.save(content, stream)
    with torch.serialization.set_default_mmap_options(mmap.MAP_SHARED):  # the file can be written through its tensors
        mapped: Mapping[str, torch.Tensor] = torch.load(file, map_location="cpu", mmap=True, weights_only=True)[STATE]
    for name in names:
        mapped[name].copy_(source.read(name))


class _OneByOne(DefaultSavePlanner):
    """Reads each tensor when it is to be written; the state dictionary has them without memory.

    DCP holds on to every tensor until the file is closed. So the memory of each is released when DCP asks for the next:
    it is written by then.
    """

    def __init__(self, read: Callable[[str], torch.Tensor]) -> None:
        super().__init__()
        self._read = read
        self._written: torch.Tensor | None = None

    def lookup_object(self, index: MetadataIndex) -> torch.Tensor:
        if self._written is not None:
            self._written.untyped_storage().resize_(0)
        # A clone: the source may be a part of a file in memory.
        self._written = self._read(index.fqn.removeprefix("model.")).clone()
        return self._written


def _write_checkpoint(source: Source, root: AnyPath, dtype: str | None) -> None:
    started = time.perf_counter()
    state = {f"model.{name}": tensor for name, tensor in source.empty.items()}
    for mark in marks_of(step_folder(root, source.step)):
        way = f"`titanlite checkpoint rm --force {mark}` deletes it when nothing writes there"
        raise CheckpointError(f"{mark} is a save under way or cut short: {way}")
    _refuse_existing(step_folder(root, source.step))
    folder = begin(root, source.step)
    try:
        writer = HashingWriter(folder)
        with quiet():
            planner = _OneByOne(source.read)
            dcp.save(state, storage_writer=writer, planner=planner, no_dist=True)
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
            weights_only=True,
            dtype=dtype or "",
            seconds=round(time.perf_counter() - started, 3),
        )
        publish(folder, manifest)
    except BaseException:
        with suppress(OSError):
            for mark in marks_of(folder):
                delete(mark)
        raise
