"""Adapters and the weights under them as one model, for export, `sample` and `eval`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from titanlite.checkpoint.errors import CheckpointError
from titanlite.checkpoint.manifest import FILE, Manifest
from titanlite.checkpoint.store_paths import AnyPath
from titanlite.features.lora.digests import digest_of_tensor
from titanlite.features.lora.settings import BASE, DOWN, RECORD, UP, Adapters
from titanlite.models.hf_names import entry_of, texts_of
from titanlite.models.spec import Size

Read = Callable[[str], Tensor]


@dataclass(frozen=True)
class AdapterFiles:
    """The adapters of one model, wherever they lie."""

    path: AnyPath
    adapters: Adapters
    #: Our name of a parameter of an adapter → a whole tensor on the CPU.
    read: Read
    #: Path of the weights under them, now or at the time of training.
    base: str
    #: Name of each of these weights → its hash; empty: not known.
    digests: Mapping[str, str] = field(default_factory=dict)


def of_checkpoint(folder: AnyPath, manifest: Manifest, read: Read, prefix: str) -> AdapterFiles:
    """Return the adapters of a checkpoint. read: takes names with `prefix`. Raises
    CheckpointError.
    """
    try:
        record = entry_of(manifest.config, RECORD, dict)
        base = entry_of(record, BASE, dict)
        digests = {str(name): str(one) for name, one in entry_of(base, "tensors", dict).items()}
        adapters = _adapters(record, lambda name: manifest.tensors[prefix + name][1])
        place = entry_of(base, "path", str)
    except (ValueError, KeyError, IndexError, AttributeError) as error:
        raise CheckpointError(f"{folder / FILE}: its adapters cannot be read: {error}") from None
    return AdapterFiles(folder, adapters, lambda name: read(prefix + name), place, digests)


def of_peft(path: AnyPath, spec: Any, args: Any) -> AdapterFiles:
    """Return the adapters in a folder of PEFT's. Raises CheckpointError."""
    from titanlite.checkpoint.foreign_formats import open_weights
    from titanlite.features.lora.peft import base_of

    weights = open_weights(path, spec, args)
    adapters = _adapters(weights.config, weights.shape)
    return AdapterFiles(path, adapters, weights.read, base_of(path))


def _adapters(record: Mapping[str, Any], shape: Callable[[str], Sequence[int]]) -> Adapters:
    sizes = {}
    for name in texts_of(record, "targets"):
        sizes[name] = Size(shape(f"{name}.{DOWN}")[1], shape(f"{name}.{UP}")[0])
    return Adapters(
        entry_of(record, "rank", int),
        entry_of(record, "alpha", float),
        entry_of(record, "rslora", bool),
        sizes,
    )


def base_path(files_base: str, given: AnyPath | None, adapters: AnyPath) -> AnyPath:
    """Return where the weights under adapters are: `given` comes first. Raises CheckpointError."""
    from titanlite.checkpoint.store_paths import to_path

    if given is not None:
        return given
    if not files_base:
        raise CheckpointError(f"{adapters} does not name the weights under it: give --base PATH")
    found = to_path(files_base)
    if isinstance(found, Path) and not found.exists():
        raise CheckpointError(
            f"{adapters} holds adapters alone, and the weights under them are not in "
            f"{files_base}: name them with --base PATH"
        )
    return found


def merged(files: AdapterFiles, base: Read, shapes: Mapping[str, Tensor]) -> Read:
    """Return a function that reads the weights with what their adapters add.

    shapes: name → a tensor of that shape. Raises CheckpointError where an adapter fits no weight;
    the function does for weights other than those trained.
    """
    for name, size in files.adapters.sizes.items():
        weight = shapes.get(f"{name}.weight")
        wanted = (size.out_features, size.in_features)
        if weight is None or tuple(weight.shape) != wanted:
            found = "no such weight" if weight is None else str(list(weight.shape))
            raise CheckpointError(
                f"{files.path}: the adapter of {name} is for a weight {list(wanted)}, and the base "
                f"has {found}"
            )

    def read(name: str) -> Tensor:
        weight = base(name)
        digest = files.digests.get(name)
        if files.digests and digest != digest_of_tensor(weight):
            raise CheckpointError(
                f"{name} is not the weight that the adapters in {files.path} were trained on: name "
                "the right folder with --base PATH"
            )
        linear = name.removesuffix(".weight")
        if linear not in files.adapters.sizes or linear == name:
            return weight
        down = files.read(f"{linear}.{DOWN}").float()
        up = files.read(f"{linear}.{UP}").float()
        # Rounded once, by whoever takes it in another type.
        return weight.float() + files.adapters.scale * (up @ down)

    return read
