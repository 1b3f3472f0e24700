"""A run's model and the folder that its weights come from: the shape taken from there, or compared
with it. No torch.

`titanlite.resolve.load` calls both before any text is read. Checkpoints are imported only where
a run names such a folder.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from titanlite.checkpoint.errors import CheckpointError
from titanlite.checkpoint.loaded import GROUPS
from titanlite.config.errors import Problem, unfit
from titanlite.config.model_sections import Model
from titanlite.config.sections import Checkpoint
from titanlite.config.toml import quote
from titanlite.models.args import FROM_FOLDER, missing_fields
from titanlite.models.families import get_spec
from titanlite.models.spec import ModelSpec

if TYPE_CHECKING:
    from titanlite.checkpoint.source_model import SourceModel
    from titanlite.checkpoint.store_paths import AnyPath

_LOAD = "checkpoint.initial_load_path"
_FLAVOR = "model.flavor"
_CONFIG = "model.hf_config"
_ALLOWED = 'If the difference is meant, and changes no shape: checkpoint.allow_changes = ["model"]'


#: The error of a folder that gives no shape.
_no_shape = partial(unfit, code="model")


@dataclass(frozen=True)
class FolderShape:
    """The shape of a folder's model, as entries of `model.overrides`."""

    overrides: Mapping[str, Any]
    #: The file that it was read from.
    file: str


def read_shape(model: Model, section: Checkpoint, folder: str) -> FolderShape | None:
    """Return the shape for `model.flavor = "from_folder"`; None: of another flavor, or one that
    needs no folder.

    folder: of the run's own checkpoints, whose newest decides, so that a resume does not need the
    first start's folder. Then `model.hf_config`, then `checkpoint.initial_load_path`. Raises
    ConfigError, and ShapeError for an unknown name.
    """
    if model.flavor != FROM_FOLDER or model.name == "hf" or not missing_fields(model):
        return None
    key, path, there = _source_of(model, section, folder)
    if there is None and path is None:
        advice = (
            f"name it as {_LOAD} to start from its weights, or as {_CONFIG} to take the shape alone"
        )
        raise _no_shape(_FLAVOR, f"{quote(FROM_FOLDER)} needs a folder", advice)
    if there is None:
        message = f"{quote(path)} describes no model: it has no config.json"
        raise _no_shape(key, message)
    if there.family is not None:
        from titanlite.checkpoint.source_model import remedy

        message = f"is {quote(model.name)}, and {there.file} is of the family {quote(there.family)}"
        raise _no_shape("model.name", message, remedy(there, get_spec(model.name)))
    if there.args is None:
        raise _no_shape(key, f"{there.file}: {there.problem}")
    return FolderShape(_as_overrides(there.args, model), str(there.file))


def _source_of(
    model: Model, section: Checkpoint, folder: str
) -> tuple[str, str | None, SourceModel | None]:
    """Return the weights' key, its value and its model, if any. Raises ConfigError."""
    from titanlite.checkpoint.store_paths import StoreError, to_path

    spec = get_spec(model.name)
    key = _LOAD
    path = section.initial_load_path
    try:
        own = _of_own_checkpoint(to_path(folder), model.name, spec)
        if own is not None:
            return key, path, own
        if model.hf_config is not None:
            key = _CONFIG
            path = model.hf_config
            return key, path, _of_config(path, model.name, spec)
        if path is not None:
            return key, path, _of_folder(to_path(path), model.name, spec)
    except (CheckpointError, StoreError) as error:
        raise _no_shape(key, f"{quote(path)} gives no shape: {error}") from None
    return key, None, None


def _of_own_checkpoint(root: AnyPath, name: str, spec: ModelSpec) -> SourceModel | None:
    if not isinstance(root, Path) or not _holds_steps(root):
        return None
    from titanlite.checkpoint.source_model import from_checkpoint

    # A run tells what is wrong there.
    with contextlib.suppress(CheckpointError):
        return from_checkpoint(root, name, spec)
    return None


def _holds_steps(root: Path) -> bool:
    if not root.is_dir():
        return False
    from titanlite.checkpoint.manifest import steps_in

    return bool(steps_in(root))


def _of_config(source: str, name: str, spec: ModelSpec) -> SourceModel | None:
    from titanlite.checkpoint.source_model import from_hf, read_json, read_model
    from titanlite.models.hf import config_file

    if os.path.isdir(source):
        return read_model(Path(source), name, spec)
    try:
        file = Path(config_file(source))
    except Exception as error:
        # huggingface_hub and its HTTP client raise their own classes.
        reason = str(error).partition("\n")[0] or type(error).__name__
        raise CheckpointError(reason) from error
    return from_hf(file, read_json(file), spec)


def _of_folder(path: AnyPath, name: str, spec: ModelSpec) -> SourceModel | None:
    if isinstance(path, Path) and not path.exists():
        raise CheckpointError("it is not there")
    from titanlite.checkpoint.source_model import read_model

    return read_model(path, name, spec)


def _as_overrides(args: Any, model: Model) -> dict[str, Any]:
    """Return arguments as entries of `model.overrides`; the config's own win."""
    from titanlite.models.fields import LENGTH
    from titanlite.models.rope_scaling import Scaling

    found = {}
    for field in fields(args):
        value = getattr(args, field.name)
        # vocab_size, norm_type, rope_scaling
        is_given = getattr(model, field.name, None) is not None
        if value is None or field.name == LENGTH or is_given:
            continue
        found[field.name] = value.as_table() if isinstance(value, Scaling) else value
    return {**found, **model.overrides}


def source_problems(model: Model, section: Checkpoint, args: Any) -> Iterator[Problem]:
    """Compare a run's arguments with the model that it starts from.

    section: with the run's own folder; if that holds checkpoints, nothing is compared. A store is
    not asked.
    """
    if section.initial_load_path is None or not section.enable_checkpoint:
        return
    from titanlite.checkpoint.store_paths import StoreError, to_path

    path = to_path(section.initial_load_path)
    own = to_path(section.folder)
    is_local = isinstance(path, Path) and path.exists()
    resumes = isinstance(own, Path) and _holds_steps(own)
    if not is_local or resumes or "model" in section.allow_changes:
        return
    from titanlite.checkpoint.source_model import MANIFEST, differences, read_model, remedy

    spec = get_spec(model.name)
    try:
        there = read_model(path, model.name, spec)
    except (CheckpointError, StoreError):
        # The load tells which file is damaged, and what to do.
        return
    if there is None or (there.kind == MANIFEST and _has_patterns(section)):
        # Tensors that are left out may have other shapes.
        return
    found = differences(there, model.name, args)
    if found:
        lines = "".join(f"\n  {line}" for line in found)
        message = (
            f"{quote(section.initial_load_path)} holds another model, by its {there.kind}:{lines}"
        )
        way = remedy(there, spec)
        yield Problem("model", _LOAD, message, f"{way}. {_ALLOWED}" if way else _ALLOWED)


def _has_patterns(section: Checkpoint) -> bool:
    """Whether the config names weights that are not loaded or may be missing."""
    parts = set(GROUPS) - {"model"}
    excluded = [entry for entry in section.exclude_from_loading if entry not in parts]
    return bool(section.allow_missing or excluded)
