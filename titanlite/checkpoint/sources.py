"""Weights to be converted: of our checkpoints, of a Hugging Face folder, of a file of torch's. Read one by one."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from titanlite.checkpoint.contents import Contents
from titanlite.checkpoint.integrity import Progress, check_files
from titanlite.checkpoint.manifest import CheckpointError, Manifest
from titanlite.checkpoint.place import Place, StorePath
from titanlite.checkpoint.shelf import checkpoint_of
from titanlite.models import LlamaArgs, get_spec
from titanlite.models.shapes import ShapeError, from_record

HF_CONFIG, HF_INDEX, HF_SINGLE = "config.json", "model.safetensors.index.json", "model.safetensors"
#: Entries of the dictionary in a file of torch's.
STATE, MODEL, STEP = "state_dict", "model", "step"
_WEIGHTS = "model."
_HEAD = "lm_head.weight"
_DTYPES = {"F64": "float64", "F32": "float32", "BF16": "bfloat16", "F16": "float16"}


@dataclass(frozen=True)
class Source:
    """The weights of one model, under our names. `read(name)` gives a whole tensor on the CPU."""

    path: Place
    #: "checkpoint", "hf" or "torch".
    kind: str
    family: str
    args: LlamaArgs
    #: Steps that it was trained for; 0 where nothing tells.
    step: int
    #: Name → dtype, such as "bfloat16".
    dtypes: Mapping[str, str]
    shapes: Mapping[str, tuple[int, ...]]
    read: Callable[[str], torch.Tensor]
    #: Of a checkpoint.
    manifest: Manifest | None = None


def open_source(path: Place, progress: Progress = lambda done, total: None) -> Source:
    """What `path` holds, by what lies there; of a checkpoint every byte is compared with its hashes first (`progress`).

    Raises CheckpointError when it holds no weights, or others than those of the model that it describes.
    """
    if isinstance(path, StorePath):
        if path.is_file() or (path / HF_CONFIG).is_file():
            raise CheckpointError(f"{path}: only checkpoints are read from a store; copy it to this machine first")
        source = _checkpoint(checkpoint_of(path), progress)
    elif path.is_file():
        source = _torch_file(path)
    elif (path / HF_CONFIG).is_file():
        source = _hf_folder(path)
    else:
        source = _checkpoint(checkpoint_of(path), progress)
    _check(source)
    return source


def weight_names(family: str, args: LlamaArgs) -> dict[str, tuple[int, ...]]:
    """Name → shape of all that a model's state holds; a tied head has a name of its own in it."""
    state = get_spec(family).build_on_meta(args).state_dict()
    return {name: tuple(tensor.shape) for name, tensor in state.items()}


def _check(source: Source) -> None:
    """Raises CheckpointError unless the weights are those of the model, none too few and none too many."""
    wanted = weight_names(source.family, source.args)
    lines = [f"missing: {name}" for name in wanted if name not in source.shapes]
    lines += [f"not of this model: {name}" for name in source.shapes if name not in wanted]
    lines += [
        f"{name} has the shape {list(source.shapes[name])}, the model's has {list(shape)}"
        for name, shape in wanted.items()
        if name in source.shapes and source.shapes[name] != shape
    ]
    if lines:
        more = f"\n  … and {len(lines) - 8} more" if len(lines) > 8 else ""
        listed = "\n  ".join(lines[:8])
        raise CheckpointError(f"{source.path} does not hold the weights of its model:\n  {listed}{more}")


def _checkpoint(folder: Place, progress: Progress) -> Source:
    contents = Contents(folder)
    manifest = contents.manifest
    record = manifest.config.get("model")
    if not isinstance(record, dict):
        raise CheckpointError(
            f"{folder} does not say which model it is of: it was written before checkpoints did, or by a program that "
            'gave no config = {"model": titanlite.models.shapes.as_record(…)}. Resume the run, and convert its next one'
        )
    if problems := check_files(folder, manifest, progress=progress):
        raise CheckpointError("\n  ".join([f"{folder} is damaged:", *problems]))
    family, args = _described(folder, record)
    tensors = {n.removeprefix(_WEIGHTS): e for n, e in manifest.tensors.items() if n.startswith(_WEIGHTS)}
    return Source(
        folder,
        "checkpoint",
        family,
        args,
        manifest.step,
        {name: entry[0] for name, entry in tensors.items()},
        {name: tuple(entry[1]) for name, entry in tensors.items()},
        lambda name: contents.read(_WEIGHTS + name),
        manifest,
    )


def _described(path: Place, record: Mapping[str, Any]) -> tuple[str, LlamaArgs]:
    try:
        return from_record(record)
    except (ShapeError, TypeError) as error:
        raise CheckpointError(f"{path}: its model cannot be read: {error}") from None


def _hf_folder(folder: Path) -> Source:
    from safetensors import SafetensorError, safe_open

    family = "llama3"  # the models of both families differ in numbers alone
    spec = get_spec(family)
    try:
        args = spec.args_from_hf(json.loads((folder / HF_CONFIG).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise CheckpointError(f"{folder / HF_CONFIG}: {error}") from None
    opened: dict[str, Any] = {}  # their name → the file that holds it
    for file in _hf_files(folder):
        try:
            handle = safe_open(file, framework="pt")
            opened.update(dict.fromkeys(handle.keys(), handle))
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{file} cannot be read: {error}") from None
    try:
        names = {ours: theirs for theirs, ours in spec.names_from_hf(opened.keys(), args).items()}
    except ValueError as error:
        raise CheckpointError(f"{folder}: {error}") from None
    if args.tied:  # the head is the embedding's tensor, which files hold once
        names["output.weight"] = names["tok_embeddings.weight"]

    def read(name: str) -> torch.Tensor:
        tensor: torch.Tensor = opened[names[name]].get_tensor(names[name])
        return tensor

    if args.tied and _HEAD in opened and not torch.equal(opened[_HEAD].get_tensor(_HEAD), read("output.weight")):
        raise CheckpointError(f"{folder}: {_HEAD} differs from the embedding, but {HF_CONFIG} says that they are tied")
    pieces = {ours: opened[theirs].get_slice(theirs) for ours, theirs in names.items()}
    dtypes = {name: _DTYPES.get(piece.get_dtype(), piece.get_dtype()) for name, piece in pieces.items()}
    return Source(folder, "hf", family, args, 0, dtypes, {n: tuple(p.get_shape()) for n, p in pieces.items()}, read)


def _hf_files(folder: Path) -> list[Path]:
    if (folder / HF_SINGLE).is_file():
        return [folder / HF_SINGLE]
    try:
        index = json.loads((folder / HF_INDEX).read_text(encoding="utf-8"))["weight_map"]
        names = sorted(set(index.values()))
    except FileNotFoundError:
        raise CheckpointError(f"{folder} holds neither {HF_SINGLE} nor {HF_INDEX}") from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{folder / HF_INDEX} cannot be read: {error!r}") from None
    if outside := [name for name in names if Path(name).name != name]:
        raise CheckpointError(f"{folder / HF_INDEX} names {outside[0]!r}, which is no file of this folder")
    return [folder / name for name in names]


def _torch_file(path: Path) -> Source:
    try:
        content = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except Exception as error:  # a pickle that is none of tensors, a cut file: torch has many ways to say so
        raise CheckpointError(f"{path} is no file of tensors by torch.save: {error}") from None
    state = content.get(STATE) if isinstance(content, dict) else None
    if not isinstance(state, dict) or not isinstance(content.get(MODEL), dict):
        raise CheckpointError(
            f'{path} must hold {{"{STATE}": name → tensor, "{MODEL}": titanlite.models.shapes.as_record(…)}}, as '
            "`titanlite checkpoint convert --to torch` writes it"
        )
    family, args = _described(path, content[MODEL])
    tensors = {str(name): tensor for name, tensor in state.items() if isinstance(tensor, torch.Tensor)}
    return Source(
        path,
        "torch",
        family,
        args,
        int(content.get(STEP, 0)),
        {name: str(tensor.dtype).removeprefix("torch.") for name, tensor in tensors.items()},
        {name: tuple(tensor.shape) for name, tensor in tensors.items()},
        tensors.__getitem__,
    )
