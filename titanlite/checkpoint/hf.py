"""Hugging Face's folders: config.json, safetensors files, and an index where there are several.

Float8 weights are read with their scales.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch

from titanlite.checkpoint.errors import CheckpointError
from titanlite.checkpoint.foreign_weights import Part, Slices, Weights
from titanlite.checkpoint.hf_files import HF_CONFIG, HF_INDEX, HF_SINGLE
from titanlite.checkpoint.source_model import read_json
from titanlite.models.families import family_of, get_spec
from titanlite.models.hf_names import (
    HF_HEAD,
    HFName,
    as_names,
    entry_of,
    is_derived,
    parts_of_entry,
)
from titanlite.models.spec import ModelSpec
from titanlite.utils import counted, logger

DTYPES = {"F64": "float64", "F32": "float32", "BF16": "bfloat16", "F16": "float16"}
_FLOAT8 = {"F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2"}
#: Tensors beside float8 weights: their scales, read with them, and those of activations, which
#: training does not need.
_SCALES = re.compile(r".*\.(weight_scale|weight_scale_inv|input_scale|activation_scale|[kv]_scale)")


def open_hf(path: Path, spec: ModelSpec | None, args: Any) -> Weights:
    """Return the weights of a folder or file; arguments as for `open_weights`."""
    folder = path if path.is_dir() else path.parent
    file = folder / HF_CONFIG
    needs_config = spec is None or path.is_dir()
    config = read_json(file) if needs_config or file.is_file() else {}
    family = ""
    try:
        if spec is None:
            family, args = family_of(config)
            spec = get_spec(family)
        names = spec.hf_names(args)
    except ValueError as error:
        raise CheckpointError(f"{file} cannot be used: {error}") from None
    found = _safetensors(path, config)
    _leave_out(path, found, spec.left_out(found))
    plain: dict[str, Part] = {}
    for name, part in found.items():
        first = plain.setdefault(name.removeprefix(spec.part_prefix), part)
        if first is not part:
            raise CheckpointError(f"{path} has both {first.name} and {name}: take one of them out")
    found = plain
    tied = spec.tied(args)
    head = found.pop(HF_HEAD, None) if tied else None
    parts: dict[str, list[Part]] = {}
    for ours, theirs in names.items():
        of_ours = _parts_of(path, ours, theirs, found)
        if of_ours:
            parts[ours] = of_ours
    # Tensors that the model does not have.
    for name, part in found.items():
        if name in parts:
            raise CheckpointError(
                f"{path} has both {parts[name][0].name} and {name}, one weight: take one of them "
                "out"
            )
        parts[name] = [part.at_start()]
    for name, other in tied.items():
        if other in parts:
            parts[name] = parts[other]
    return Weights(path, family, args, parts, config, head, next(iter(tied.values()), ""))


def _leave_out(path: Path, found: dict[str, Part], left_out: Mapping[str, str]) -> None:
    for name in left_out:
        del found[name]
    for reason in sorted(set(left_out.values())):
        left = [name for name in left_out if left_out[name] == reason]
        many = counted(len(left), "tensors")
        _tell(f"{path}: {many} left out, {min(left)} and others: {reason}")


@functools.cache
def _tell(line: str) -> None:
    """Log a line once: a run opens its files several times."""
    logger.info(line)


def _parts_of(path: Path, ours: str, theirs: HFName, found: dict[str, Part]) -> list[Part]:
    """Take one tensor's parts out of `found`; none if all are missing."""
    parts = []
    missing = []
    in_entry = parts_of_entry(theirs)
    for place, name in enumerate(as_names(theirs)):
        part = found.pop(name, None)
        if part is None:
            missing.append(name)
        elif isinstance(theirs, str):
            parts.append(part.at_start())
        else:
            if not part.shape:
                raise CheckpointError(f"{path}: {name}, a part of {ours}, is a single number")
            entry, piece = divmod(place, in_entry)
            parts.append(part.stacked(entry, piece * part.shape[0]))
    if parts and missing:
        raise CheckpointError(
            f"{path} lacks {missing[0]}, a part of {ours}: files are missing, or the model has "
            "another number of parts"
        )
    first = parts[0] if parts else None
    for part in parts:
        if first is not None and part.dtype != first.dtype:
            raise CheckpointError(
                f"{path}: {part.name} is {part.dtype}, and {first.name} {first.dtype}: all "
                f"parts of {ours} need one dtype"
            )
        if first is not None and part.shape != first.shape:
            raise CheckpointError(
                f"{path}: {part.name} is {list(part.shape[1:])}, and {first.name} "
                f"{list(first.shape[1:])}: all parts of {ours} need one shape"
            )
    return parts


def _files(path: Path) -> dict[Path, set[str]]:
    """Return file → names in the index (none for a single file)."""
    if path.is_file():
        return {path: set()}
    if (path / HF_SINGLE).is_file():
        return {path / HF_SINGLE: set()}
    index = path / HF_INDEX
    if index.is_file():
        try:
            names = read_json(index).get("weight_map")
        except CheckpointError as error:
            raise CheckpointError(f"{error}; download it again") from None
        if not isinstance(names, dict) or any(
            Path(str(name)).name != name for name in names.values()
        ):
            raise CheckpointError(
                f"{index} has no weight_map of files in this folder; download it again"
            )
        found: dict[Path, set[str]] = {}
        for name, listed in sorted(names.items(), key=lambda entry: (entry[1], entry[0])):
            found.setdefault(path / listed, set()).add(name)
        return found
    files = sorted(path.glob("*.safetensors"))
    if len(files) == 1:
        return {files[0]: set()}
    way = f"the index of its {len(files)} files" if files else "the weights as safetensors"
    raise CheckpointError(f"{path} has neither {HF_SINGLE} nor {HF_INDEX}: download {way}")


def _safetensors(path: Path, config: Mapping[str, Any]) -> dict[str, Part]:
    """Raises CheckpointError."""
    opened: dict[str, tuple[Path, Any]] = {}
    files = _files(path)
    for file, listed in files.items():
        handle = open_safetensors(file)
        names = {*handle.keys()}
        missing = listed - names
        if missing:
            raise CheckpointError(
                f"{file} lacks {min(missing)}, which {HF_INDEX} says it holds: download it again"
            )
        # A file may hold more, and the index says what counts.
        opened |= dict.fromkeys(listed or names, (file, handle))
    parts = {}
    for name, (file, handle) in opened.items():
        if is_derived(name) or _SCALES.fullmatch(name):
            continue
        view = handle.get_slice(name)
        kind = view.get_dtype()
        shape = tuple(view.get_shape())
        if kind in DTYPES:
            dtype = getattr(torch, DTYPES[kind])
            parts[name] = Part(file, name, dtype, shape, partial(_sliced, view))
        elif kind in _FLOAT8:
            inverse = f"{name}_scale_inv"
            scale = inverse if inverse in opened else f"{name}_scale"
            if scale not in opened:
                raise CheckpointError(
                    f"{file}: {name} is {_FLOAT8[kind]} without a tensor {inverse} or _scale"
                )
            scales = opened[scale][1].get_tensor(scale)
            try:
                read = _dequantized(view, shape, scales, _block_of(config))
            except ValueError as error:
                raise CheckpointError(f"{file}: {name} {error}") from None
            parts[name] = Part(file, name, torch.float32, shape, read)
        elif not (name.endswith("_scales") and f"{name[:-7]}_blocks" in opened):
            part = _mxfp4(name, opened)
            parts[part.name] = part
    return parts


def _mxfp4(name: str, opened: Mapping[str, tuple[Path, Any]]) -> Part:
    """Raises CheckpointError for blocks that are no integers with scales."""
    file, handle = opened[name]
    view = handle.get_slice(name)
    whole = name.removesuffix("_blocks")
    scales = f"{whole}_scales"
    if whole == name or scales not in opened or view.get_dtype() != "U8":
        raise CheckpointError(
            f"{file}: {name} has type {view.get_dtype()}: integers of a quantised model cannot be "
            "trained. Take the weights in bfloat16"
        )
    from titanlite.checkpoint.mxfp4 import unpacked

    try:
        shape, read = unpacked(view, opened[scales][1].get_slice(scales))
    except ValueError as error:
        raise CheckpointError(f"{file}: {name} {error}") from None
    return Part(file, whole, torch.bfloat16, shape, read)


def open_safetensors(file: Path) -> Any:
    """Return safetensors' handle of a file."""
    from safetensors import SafetensorError, safe_open

    try:
        return safe_open(file, framework="pt")
    except FileNotFoundError:
        raise CheckpointError(
            f"{file} is missing, which {HF_INDEX} names: download it again"
        ) from None
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{file} cannot be read ({error}): download it again") from None


def _sliced(view: Any, slices: Slices) -> torch.Tensor:
    tensor: torch.Tensor = view[slices]
    return tensor


def _block_of(config: Mapping[str, Any]) -> tuple[int, ...] | None:
    """Return the rows and columns that share a scale, by config.json. Raises CheckpointError."""
    try:
        section = entry_of(config, "quantization_config", dict, {})
        block: list[Any] = entry_of(section, "weight_block_size", list, [])
    except ValueError as error:
        raise CheckpointError(f"{HF_CONFIG}: {error}") from None
    are_sizes = all(type(size) is int and size > 0 for size in block)
    if block and (len(block) != 2 or not are_sizes):
        raise CheckpointError(
            f"{HF_CONFIG}: weight_block_size is {block!r:.80}, expected two positive integers"
        )
    return tuple(block) or None


def _dequantized(
    view: Any, shape: tuple[int, ...], scale: torch.Tensor, block: tuple[int, ...] | None
) -> Callable[[Slices], torch.Tensor]:
    """Return a reader of float8 weights times their scales, in float32, which is exact enough.

    A scale is of a block (`weight_block_size`), a row, or the tensor. Raises ValueError for others.
    """
    if not scale.is_floating_point():
        kind = str(scale.dtype).removeprefix("torch.")
        raise ValueError(
            f"has scales of type {kind}, which may be exponents: take bfloat16 weights"
        )
    grid = scale.float()
    if grid.numel() == 1:
        grid = grid.reshape(1, 1)
    if grid.ndim == 1:
        grid = grid[:, None]
    if block is None and grid.shape == (1, 1):
        block = (shape[0], shape[-1])
    elif block is None and grid.shape == (shape[0], 1):
        block = (1, shape[-1])
    blocks = [-(-size // step) for size, step in zip(shape, block or (), strict=False)]
    if len(shape) != 2 or block is None or list(grid.shape) != blocks:
        raise ValueError(
            f"{list(shape)} in float8 has scales {list(scale.shape)}, and config.json "
            f"weight_block_size = {block}: titanlite reads one scale per block, row or tensor"
        )
    # Row and column of the grid by row and column of the weight.
    grid_rows = torch.arange(shape[0]) // block[0]
    grid_columns = torch.arange(shape[1]) // block[1]

    def read(slices: Slices) -> torch.Tensor:
        scales = grid[grid_rows[slices[0]]][:, grid_columns[slices[1]]]
        return _sliced(view, slices).float().mul_(scales)

    return read
