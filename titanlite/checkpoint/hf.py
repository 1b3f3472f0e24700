"""Weights of other programs: Hugging Face's folders of safetensors files, and Meta's
consolidated.*.pth.

`open_weights` reads names, shapes and the config alone. `WeightsReader` then gives DCP slices of
the tensors: each rank reads its own part of the model, and has one slice besides it in memory.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from titanlite.checkpoint.hf_files import HF_CONFIG as HF_CONFIG
from titanlite.checkpoint.hf_files import HF_INDEX as HF_INDEX
from titanlite.checkpoint.hf_files import HF_SINGLE as HF_SINGLE
from titanlite.checkpoint.hf_files import META_CONFIG as META_CONFIG
from titanlite.checkpoint.hf_files import META_FILES as META_FILES
from titanlite.checkpoint.hf_files import holds_weights as holds_weights
from titanlite.checkpoint.manifest import CheckpointError, Manifest
from titanlite.checkpoint.paths import AnyPath, StorePath
from titanlite.checkpoint.source_model import differences, read_json, read_model, remedy
from titanlite.models.families import family_of, get_spec
from titanlite.models.hf_names import HF_HEAD, as_names, entry_of, is_derived
from titanlite.models.spec import ModelSpec

_DTYPES = {"F64": "float64", "F32": "float32", "BF16": "bfloat16", "F16": "float16"}
_FLOAT8 = {"F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2"}
#: Tensors beside float8 weights: their scales, read with them, and those of activations, which
#: training does not need.
_SCALES = re.compile(r".*\.(weight_scale|weight_scale_inv|input_scale|activation_scale|[kv]_scale)")
#: Elements that are compared at a time.
_CHUNK = 1 << 24
Slices = tuple[slice, ...]


@dataclass(frozen=True)
class Part:
    """A tensor in a file, which is one of ours or a part of it."""

    file: Path
    #: Its name there.
    name: str
    dtype: torch.dtype
    #: Of the part, in our tensor's dimensions, and where it begins there.
    shape: tuple[int, ...]
    #: Reads a slice of it, by our dimensions.
    read: Callable[[Slices], torch.Tensor]
    offsets: tuple[int, ...] = ()

    def at(self, *offsets: int) -> Part:
        return replace(self, offsets=offsets)

    def stacked(self, place: int) -> Part:
        """Return the part as row `place` of a stack of such tensors."""
        read = self.read
        return replace(
            self,
            shape=(1, *self.shape),
            offsets=(place, *(0 for _ in self.shape)),
            read=lambda slices: read(slices[1:])[None],
        )


@dataclass(frozen=True)
class Weights:
    """The weights of one model in files of another program, under our names (without "model.")."""

    path: Path
    family: str
    args: Any
    #: Our name → its parts. Tensors that the model does not have are here under their own names.
    parts: dict[str, list[Part]]
    #: The content of config.json, or of params.json.
    config: dict[str, Any] = field(default_factory=dict)
    #: A head in the file of a model that ties it to the embedding, and our name of that.
    spare_head: Part | None = None
    embedding: str = "tok_embeddings.weight"

    def shape(self, name: str) -> tuple[int, ...]:
        ends = ([o + s for o, s in zip(p.offsets, p.shape, strict=True)] for p in self.parts[name])
        return tuple(map(max, zip(*ends, strict=True)))

    def entries(self) -> dict[str, list[Any]]:
        """Return name → [dtype, shape, place], as manifests hold tensors."""
        return {
            name: [
                str(part[0].dtype).removeprefix("torch."),
                list(self.shape(name)),
                _place(part[0]),
            ]
            for name, part in self.parts.items()
        }

    def read(self, name: str) -> torch.Tensor:
        """Return a whole tensor on the CPU."""
        parts = self.parts[name]
        if len(parts) == 1:
            return parts[0].read(tuple(slice(0, size) for size in parts[0].shape))
        whole = torch.empty(self.shape(name), dtype=parts[0].dtype)
        for part in parts:
            target = tuple(
                slice(o, o + size) for o, size in zip(part.offsets, part.shape, strict=True)
            )
            whole[target] = part.read(tuple(slice(0, size) for size in part.shape))
        return whole

    def check_head(self) -> None:
        """Raise CheckpointError if a file holds a separate head though the config ties it to the
        embedding.
        """
        if (head := self.spare_head) is None:
            return
        (embedding,) = self.parts[self.embedding]
        rows, width = head.shape
        step = max(1, _CHUNK // width)
        for start in range(0, rows, step):
            chunk = (slice(start, min(start + step, rows)), slice(0, width))
            if head.shape != embedding.shape or not torch.equal(
                head.read(chunk), embedding.read(chunk)
            ):
                raise CheckpointError(
                    f"{self.path}: {head.name} differs from the embedding, but {HF_CONFIG} says "
                    "that they are tied: set tie_word_embeddings to false there, and "
                    "model.overrides.tied"
                )


def _place(part: Part) -> str:
    return f"{part.file.name}: {part.name}"


def open_weights(path: AnyPath, spec: ModelSpec | None = None, args: Any = None) -> Weights:
    """Open the weights in `path`: names, shapes and config; the tensors are read later.

    path: a folder with config.json and safetensors files, one such file, or Meta's
    consolidated.*.pth with params.json. spec, args: the model that shall take them; None: the one
    that config.json describes.

    Raises CheckpointError with file, tensor and remedy. Missing and misshaped tensors are the
    caller's to find, by `Weights.entries`.
    """
    if isinstance(path, StorePath):
        raise CheckpointError(
            f"{path}: Hugging Face weights are not read from a store; copy it to this machine first"
        )
    if path.is_dir() and (path / META_CONFIG).is_file() and any(path.glob(META_FILES)):
        from titanlite.checkpoint.meta import open_meta  # it imports this module

        return open_meta(path, args)
    return _open_hf(path, spec, args)


def _open_hf(path: Path, spec: ModelSpec | None, args: Any) -> Weights:
    folder = path if path.is_dir() else path.parent
    file = folder / HF_CONFIG
    config = read_json(file) if file.is_file() or spec is None or path.is_dir() else {}
    family = ""
    try:
        if spec is None:
            family, args = family_of(config)
            spec = get_spec(family)
        names = spec.hf_names(args)
    except ValueError as error:
        raise CheckpointError(f"{file} cannot be used: {error}") from None
    found = _safetensors(path, config)
    tied = spec.tied(args)
    head = found.pop(HF_HEAD, None) if tied else None
    parts: dict[str, list[Part]] = {}
    for ours, theirs in names.items():
        one = [found.pop(name, None) for name in as_names(theirs)]
        if not isinstance(theirs, str):
            one = [part and part.stacked(place) for place, part in enumerate(one)]
        if all(one):
            parts[ours] = [
                part if part.offsets else part.at(*(0 for _ in part.shape)) for part in one if part
            ]
        elif any(one):
            lacking = next(
                name for name, part in zip(as_names(theirs), one, strict=True) if not part
            )
            raise CheckpointError(
                f"{path} lacks {lacking}, a part of {ours}: files are missing, or the model has "
                "another number of parts"
            )
    parts.update((name, [part.at(*(0 for _ in part.shape))]) for name, part in found.items())
    parts.update((name, parts[other]) for name, other in tied.items() if other in parts)
    return Weights(path, family, args, parts, config, head, next(iter(tied.values()), ""))


def _files(path: Path) -> dict[Path, set[str]]:
    """Return the safetensors files → names that the index says they hold (none for a single
    file).
    """
    if path.is_file():
        return {path: set()}
    if (path / HF_SINGLE).is_file():
        return {path / HF_SINGLE: set()}
    index = path / HF_INDEX
    if not index.is_file():
        files = sorted(path.glob("*.safetensors"))
        if len(files) == 1:
            return {files[0]: set()}
        raise CheckpointError(
            f"{path} has neither {HF_SINGLE} nor {HF_INDEX}: "
            + (
                f"download the index of its {len(files)} files"
                if files
                else "download the weights as safetensors"
            )
        )
    try:
        names = read_json(index).get("weight_map")
    except CheckpointError as error:
        raise CheckpointError(f"{error}; download it again") from None
    if not isinstance(names, dict) or any(Path(str(name)).name != name for name in names.values()):
        raise CheckpointError(
            f"{index} has no weight_map of files in this folder; download it again"
        )
    found: dict[Path, set[str]] = {}
    for name, file in sorted(names.items(), key=lambda entry: (entry[1], entry[0])):
        found.setdefault(path / file, set()).add(name)
    return found


def _safetensors(path: Path, config: Mapping[str, Any]) -> dict[str, Part]:
    """Return name → tensor of all files. Raises CheckpointError."""
    from safetensors import SafetensorError, safe_open

    opened: dict[str, tuple[Path, Any]] = {}
    for file, listed in _files(path).items():
        try:
            handle = safe_open(file, framework="pt")
            names = {*handle.keys()}
        except FileNotFoundError:
            raise CheckpointError(
                f"{file} is missing, which {HF_INDEX} names: download it again"
            ) from None
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{file} cannot be read ({error}): download it again") from None
        if missing := listed - names:
            raise CheckpointError(
                f"{file} lacks {min(missing)}, which {HF_INDEX} says it holds: download it again"
            )
        opened.update(dict.fromkeys(names, (file, handle)))
    parts = {}
    for name, (file, handle) in opened.items():
        if is_derived(name) or _SCALES.fullmatch(name):
            continue
        view = handle.get_slice(name)
        kind, shape = view.get_dtype(), tuple(view.get_shape())
        if kind in _FLOAT8:
            scale = next((s for s in (f"{name}_scale_inv", f"{name}_scale") if s in opened), None)
            if scale is None:
                raise CheckpointError(
                    f"{file}: {name} is {_FLOAT8[kind]} without a tensor {name}_scale_inv or _scale"
                )
            scales = opened[scale][1].get_tensor(scale)
            read = _dequantized(file, name, view, shape, scales, _block_of(config))
            parts[name] = Part(file, name, torch.float32, shape, read)
        elif kind in _DTYPES:
            parts[name] = Part(
                file, name, getattr(torch, _DTYPES[kind]), shape, partial(_sliced, view)
            )
        else:
            raise CheckpointError(
                f"{file}: {name} has type {kind}: integers of a quantised model cannot be "
                "trained. Take the weights in bfloat16"
            )
    return parts


def _sliced(view: Any, slices: Slices) -> torch.Tensor:
    tensor: torch.Tensor = view[slices]
    return tensor


def _block_of(config: Mapping[str, Any]) -> tuple[int, ...] | None:
    """Return rows and columns that share a scale, by config.json; None: it does not say.

    Raises CheckpointError.
    """
    try:
        block: list[Any] = entry_of(
            entry_of(config, "quantization_config", dict, {}), "weight_block_size", list, []
        )
    except ValueError as error:
        raise CheckpointError(f"{HF_CONFIG}: {error}") from None
    if block and (len(block) != 2 or not all(type(size) is int and size > 0 for size in block)):
        raise CheckpointError(
            f"{HF_CONFIG}: weight_block_size is {block!r:.80}, expected two positive integers"
        )
    return tuple(block) or None


def _dequantized(
    file: Path,
    name: str,
    view: Any,
    shape: tuple[int, ...],
    scale: torch.Tensor,
    block: tuple[int, ...] | None,
) -> Callable[[Slices], torch.Tensor]:
    """Return a reader of float8 weights times their scales, in float32, which holds the product
    exactly enough.

    A scale belongs to a block of rows and columns (`weight_block_size`), to a row, or to the whole
    tensor.
    """
    grid = scale.float().reshape(1, 1) if scale.numel() == 1 else scale.float()
    if grid.ndim == 1:
        grid = grid[:, None]
    if block is None and grid.shape in ((1, 1), (shape[0], 1)):
        block = (shape[0] if grid.size(0) == 1 else 1, shape[-1])
    if len(shape) != 2 or block is None or tuple(grid.shape) != tuple(map(_ceil_div, shape, block)):
        raise CheckpointError(
            f"{file}: {name} {list(shape)} in float8 has scales {list(scale.shape)}, and "
            f"config.json weight_block_size = {block}: titanlite reads one scale per block, row "
            "or tensor"
        )
    per_row, per_column = (
        torch.arange(size) // step for size, step in zip(shape, block, strict=True)
    )

    def read(slices: Slices) -> torch.Tensor:
        rows, columns = per_row[slices[0]], per_column[slices[1]]
        product = _sliced(view, slices).float()
        return product.mul_(grid[rows][:, columns])

    return read


def _ceil_div(size: int, step: int) -> int:
    return -(-size // step)


# The model that a folder describes, against the section [model]


def check_model(path: AnyPath, name: str, spec: ModelSpec, args: Any, allowed: bool) -> list[str]:
    """Return the differences between the run's model and the one that a folder describes, a line
    each.

    name: `model.name`. Raises CheckpointError for any difference, unless they are allowed.
    """
    if isinstance(path, StorePath):
        return []  # `open_weights` refuses it
    there = read_model(path, name, spec)
    found = differences(there, name, spec, args) if there is not None else []
    if there is not None and found and not allowed:
        lines = "".join(f"\n  {line}" for line in found)
        way = remedy(there, spec) or "Set [model], or model.overrides, so"
        raise CheckpointError(
            f"{path} is of another model than this run's, by its {there.kind}:{lines}\n{way}. If "
            "the difference is meant, and changes no shape, say so: "
            "--checkpoint.allow_changes=model"
        )
    return found


# Reading by torch.distributed.checkpoint


class WeightsReader(StorageReader):
    """Gives DCP the tensors of `Weights` under the names of a checkpoint, `model.…`."""

    def __init__(self, folder: AnyPath, manifest: Manifest, spec: ModelSpec, args: Any) -> None:
        self.folder, self.manifest = folder, manifest
        self._spec, self._args = spec, args
        self._parts: dict[MetadataIndex, Part] = {}

    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        """Raises CheckpointError when the files are not those that rank 0 has seen."""
        weights, tensors = open_weights(self.folder, self._spec, self._args), {}
        for name, (dtype, shape, *_rest) in weights.entries().items():
            chunks = [
                ChunkStorageMetadata(torch.Size(p.offsets), torch.Size(p.shape))
                for p in weights.parts[name]
            ]
            kind = TensorProperties(getattr(torch, dtype))
            tensors[f"model.{name}"] = TensorStorageMetadata(kind, torch.Size(shape), chunks)
            for part in weights.parts[name]:
                self._parts[MetadataIndex(f"model.{name}", torch.Size(part.offsets))] = part
        if {name: [str(one.properties.dtype), list(one.size)] for name, one in tensors.items()} != {
            name: [f"torch.{dtype}", shape]
            for name, (dtype, shape, *_rest) in self.manifest.tensors.items()
        }:
            raise CheckpointError(f"{self.folder} is not the same for all ranks, or has changed")
        return Metadata(tensors, storage_meta=StorageMeta())  # type: ignore[arg-type]

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read the slices that this rank needs, one at a time, in the order of the files."""
        items = [(self._parts[item.storage_index], item) for item in plan.items]
        for part, item in sorted(items, key=lambda entry: (entry[0].file, entry[0].name)):
            spans = zip(item.storage_offsets, item.lengths, strict=True)
            target = planner.resolve_tensor(item).detach()
            target.copy_(part.read(tuple(slice(start, start + length) for start, length in spans)))
            planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def reset(self, checkpoint_id: Any = None) -> None:
        """Nothing is kept from one load to the next."""

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *_: Any, **__: Any
    ) -> None:
        """The parts are known since `read_metadata`, which every rank calls by `verify_files`."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return True


def as_manifest(weights: Weights) -> Manifest:
    """Return the parts of a manifest that a load reads."""
    tensors = {f"model.{name}": entry for name, entry in weights.entries().items()}
    rest: dict[str, Any] = {
        "fingerprints": {},
        "files": {},
        "train": {},
        "versions": {},
        "created": 0.0,
    }
    return Manifest(step=0, tensors=tensors, world_size=1, weights_only=True, **rest)


def total_bytes(entries: Mapping[str, Any]) -> int:
    """Return the bytes of tensors given as [dtype, shape]."""
    return sum(
        getattr(torch, entry[0]).itemsize * math.prod(entry[1]) for entry in entries.values()
    )


def our_tensors(weights: Weights) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield name → a tensor of its type and shape on the meta device."""
    for name, (dtype, shape, *_rest) in weights.entries().items():
        yield name, torch.empty(shape, dtype=getattr(torch, dtype), device="meta")
