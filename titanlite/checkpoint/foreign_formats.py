"""Weights of other programs, in the formats of one table.

`open_weights` reads names, shapes and the config alone. `WeightsReader` then gives DCP slices of
the tensors: each rank reads its own part of the model, and has one slice besides it in memory.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
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

from titanlite.checkpoint.errors import CheckpointError
from titanlite.checkpoint.foreign_weights import Part, Weights
from titanlite.checkpoint.hf_files import holds_adapters, is_torchtitan
from titanlite.checkpoint.manifest import Manifest
from titanlite.checkpoint.store_paths import AnyPath, StorePath
from titanlite.models.spec import ModelSpec

#: Function that recognizes a format by its files → function that opens its weights.
_FORMATS: dict[Callable[[Path], bool], str] = {
    holds_adapters: "titanlite.features.lora.peft:open_peft",
    is_torchtitan: "titanlite.checkpoint.torchtitan:open_torchtitan",
    lambda path: True: "titanlite.checkpoint.hf:open_hf",
}


def open_weights(path: AnyPath, spec: ModelSpec | None = None, args: Any = None) -> Weights:
    """Open the weights in `path`: names, shapes and config; the tensors are read later.

    path: a folder with config.json and safetensors files, one such file, or a folder of torchtitan
    or PEFT. spec, args: the model that shall take them; None: the one in config.json.

    Raises CheckpointError with file, tensor and remedy. The caller finds missing and misshaped
    tensors by `Weights.entries`.
    """
    if isinstance(path, StorePath):
        raise CheckpointError(
            f"{path}: weights of other programs are not read from a store; copy them to this "
            "machine first"
        )
    opener = next(opener for knows, opener in _FORMATS.items() if knows(path))
    module, _, function = opener.partition(":")
    weights: Weights = getattr(importlib.import_module(module), function)(path, spec, args)
    return weights


# Reading by torch.distributed.checkpoint


class WeightsReader(StorageReader):
    """Gives DCP the tensors of `Weights` under the names of a checkpoint, `model.…`."""

    def __init__(self, folder: AnyPath, manifest: Manifest, spec: ModelSpec, args: Any) -> None:
        self.folder = folder
        self.manifest = manifest
        self._spec = spec
        self._args = args
        self._parts: dict[MetadataIndex, Part] = {}

    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        """Raises CheckpointError for other files than rank 0 has seen."""
        weights = open_weights(self.folder, self._spec, self._args)
        tensors: dict[str, TensorStorageMetadata] = {}
        described = {}
        for name, entry in weights.entries().items():
            dtype, shape = entry[:2]
            chunks = []
            for part in weights.parts[name]:
                offsets = torch.Size(part.offsets)
                chunks.append(ChunkStorageMetadata(offsets, torch.Size(part.shape)))
                self._parts[MetadataIndex(f"model.{name}", offsets)] = part
            properties = TensorProperties(getattr(torch, dtype))
            tensors[f"model.{name}"] = TensorStorageMetadata(properties, torch.Size(shape), chunks)
            described[f"model.{name}"] = entry[:2]
        seen = {name: entry[:2] for name, entry in self.manifest.tensors.items()}
        if described != seen:
            raise CheckpointError(f"{self.folder} is not the same for all ranks, or has changed")
        return Metadata(tensors, storage_meta=StorageMeta())  # type: ignore[arg-type]

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read this rank's slices one at a time, in the order of the files."""
        items = [(self._parts[item.storage_index], item) for item in plan.items]
        for part, item in sorted(items, key=lambda entry: (entry[0].file, entry[0].name)):
            slices = []
            for start, length in zip(item.storage_offsets, item.lengths, strict=True):
                slices.append(slice(start, start + length))
            target = planner.resolve_tensor(item).detach()
            target.copy_(part.read(tuple(slices)))
            planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def reset(self, checkpoint_id: Any = None) -> None:
        """Nothing is kept from one load to the next."""

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *_: Any, **__: Any
    ) -> None:
        """`read_metadata`, which every rank calls by `verify_files`, has set up all parts."""

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
    return Manifest(
        step=0,
        fingerprints={},
        tensors=tensors,
        files={},
        train={},
        versions={},
        world_size=1,
        created=0.0,
        weights_only=True,
    )
