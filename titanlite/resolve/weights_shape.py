"""A run's model and the folder that its weights come from: the shape taken from there, or compared
with it. No torch.

Checkpoints are imported only where a run names such a folder.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from dataclasses import fields
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
from titanlite.models.argument_fields import LENGTH
from titanlite.models.families import get_spec
from titanlite.models.rope_scaling import Scaling
from titanlite.models.spec import ModelSpec

if TYPE_CHECKING:
    from titanlite.checkpoint.source_model import SourceModel

_LOAD = "checkpoint.initial_load_path"
_FLAVOR = "model.flavor"
_CONFIG = "model.hf_config"
_ALLOWED = 'If the difference is meant, and changes no shape: checkpoint.allow_changes = ["model"]'


#: The error of a folder that gives no shape.
_no_shape = partial(unfit, code="model")


def read_shape(
    model: Model, section: Checkpoint, folder: str
) -> tuple[Mapping[str, Any], str] | None:
    """Return the shape for `model.flavor = "from_folder"`, as `model.overrides`, and its file.

    None: it needs no folder. folder: of the run's own checkpoints, whose newest decides; without
    one `model.hf_config` does, then `checkpoint.initial_load_path`. Raises ConfigError, ShapeError.
    """
    if model.flavor != FROM_FOLDER or model.name == "hf" or not missing_fields(model):
        return None
    from titanlite.checkpoint.source_model import from_checkpoint, remedy
    from titanlite.checkpoint.store_paths import StoreError, to_path

    spec = get_spec(model.name)
    key, path = _CONFIG, model.hf_config
    if path is None:
        key, path = _LOAD, section.initial_load_path
    there = None
    try:
        own = to_path(folder)
        if isinstance(own, Path) and _holds_steps(own):
            # A run tells what is wrong there.
            with contextlib.suppress(CheckpointError):
                there = from_checkpoint(own, model.name, spec)
        if there is None and path is not None:
            there = _model_of(key, path, model.name, spec)
    except (CheckpointError, StoreError) as error:
        raise _no_shape(key, f"{quote(path)} gives no shape: {error}") from None
    if there is None and path is None:
        advice = (
            f"name it as {_LOAD} to start from its weights, or as {_CONFIG} to take the shape alone"
        )
        raise _no_shape(_FLAVOR, f"{quote(FROM_FOLDER)} needs a folder", advice)
    if there is None:
        raise _no_shape(key, f"{quote(path)} describes no model: it has no config.json")
    if there.family is not None:
        message = f"is {quote(model.name)}, and {there.file} is of the family {quote(there.family)}"
        raise _no_shape("model.name", message, remedy(there, spec))
    if there.args is None:
        raise _no_shape(key, f"{there.file}: {there.problem}")
    return _as_overrides(there.args, model), str(there.file)


def _model_of(key: str, path: str, name: str, spec: ModelSpec) -> SourceModel | None:
    from titanlite.checkpoint.source_model import from_hf, read_json, read_model
    from titanlite.checkpoint.store_paths import to_path

    if key == _CONFIG and not os.path.isdir(path):
        from titanlite.models.hf import config_file

        try:
            file = Path(config_file(path))
        except Exception as error:
            # huggingface_hub and its HTTP client raise their own classes.
            reason = str(error).partition("\n")[0] or type(error).__name__
            raise CheckpointError(reason) from error
        return from_hf(file, read_json(file), spec)
    root = to_path(path)
    if isinstance(root, Path) and not root.exists():
        raise CheckpointError("it is not there")
    return read_model(root, name, spec)


def _as_overrides(args: Any, model: Model) -> dict[str, Any]:
    """Return arguments as entries of `model.overrides`; the config's own win."""
    found = {}
    for field in fields(args):
        value = getattr(args, field.name)
        # vocab_size, norm_type, rope_scaling
        is_given = getattr(model, field.name, None) is not None
        if value is not None and field.name != LENGTH and not is_given:
            found[field.name] = value.as_table() if isinstance(value, Scaling) else value
    return {**found, **model.overrides}


def _holds_steps(root: Path) -> bool:
    if not root.is_dir():
        return False
    from titanlite.checkpoint.manifest import steps_in

    return bool(steps_in(root))


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
    excluded = {*section.exclude_from_loading} - ({*GROUPS} - {"model"})
    if there is None or (there.kind == MANIFEST and (excluded or section.allow_missing)):
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
