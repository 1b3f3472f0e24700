"""The model that a folder of weights describes, and how another model differs from it.

No torch here.

Only small JSON files are read: Hugging Face's config.json, or the manifest of a checkpoint. So a
config is compared with its weights before any text is read. A run can also take its shape from a
folder.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from titanlite.checkpoint.hf_files import HF_CONFIG, is_torchtitan
from titanlite.checkpoint.manifest import FILE as MANIFEST
from titanlite.checkpoint.manifest import (
    CheckpointError,
    find,
    parse_manifest,
    root_of,
    step_folder,
    step_of,
)
from titanlite.checkpoint.store_paths import AnyPath
from titanlite.config.toml import quote
from titanlite.models.argument_fields import checked_fields, deciding
from titanlite.models.families import builtin_family
from titanlite.models.rope_scaling import Scaling
from titanlite.models.spec import ModelSpec
from titanlite.utils import is_dotted, parse_json

#: Keys of `[model]` that are no entries of `model.overrides`.
OWN_KEYS = ("vocab_size", "norm_type", "rope_scaling")


@dataclass(frozen=True)
class SourceModel:
    """A model as a file beside its weights describes it."""

    file: AnyPath
    #: Its family here, by `model.name`; None: the same as that of the run.
    family: str | None = None
    #: Arguments of the run's family; None where the file describes another one, or none that is
    #: known.
    args: Any = None
    #: Why `args` is None, if the family is the same.
    problem: str = ""

    @property
    def kind(self) -> str:
        return self.file.name


def read_model(path: AnyPath, name: str, spec: ModelSpec) -> SourceModel | None:
    """Return the model that `path` describes, as a model of the family `spec`.

    path: as for `checkpoint.initial_load_path`; name: `model.name` of the run. None: the path
    describes no model, such as tensors alone, or a checkpoint of a program of one's own.

    Raises CheckpointError for a file that cannot be read, and StoreError for a store that cannot be
    asked.
    """
    folder = path.parent if isinstance(path, Path) and path.is_file() else path
    if (folder / HF_CONFIG).is_file():
        return from_hf(folder / HF_CONFIG, read_json(folder / HF_CONFIG), spec)
    if isinstance(folder, Path) and (path != folder or any(folder.glob("*.safetensors"))):
        return None
    if is_torchtitan(folder):
        return None
    return from_checkpoint(folder, name, spec)


def read_json(file: AnyPath) -> dict[str, Any]:
    """Return the object in a JSON file. Raises CheckpointError, naming the file."""
    try:
        content = parse_json(file.read_bytes())
    except FileNotFoundError:
        raise CheckpointError(
            f"{file} is missing: copy it from where the weights are from"
        ) from None
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{file} cannot be read: {error}") from None
    if not isinstance(content, dict):
        raise CheckpointError(f"{file} cannot be used: it holds no JSON object")
    return content


def from_hf(file: AnyPath, content: Mapping[str, Any], spec: ModelSpec) -> SourceModel:
    """Return the model of Hugging Face's config.json."""
    from titanlite.models.families import SPECS

    family = builtin_family(content)
    # A built-in family takes files of one model_type alone; `hf` takes any.
    is_decoder = spec.name != "hf" and SPECS.get(spec.name) is spec
    if family is not None and is_decoder and not is_alike(family, spec):
        return SourceModel(file, family)
    try:
        return SourceModel(file, args=spec.args_from_hf(content))
    except ValueError as error:
        return SourceModel(file, problem=str(error))


def from_checkpoint(path: AnyPath, name: str, spec: ModelSpec) -> SourceModel | None:
    """Return the model of a checkpoint, or of a run's newest."""
    if step_of(path) is not None:
        folder, manifest = path, parse_manifest(path)
    else:
        root = root_of(path)
        manifest = find(root).valid(root)
        folder = step_folder(root, manifest.step)
    record = manifest.config.get("model")
    if not isinstance(record, dict):
        # An early version wrote none.
        return None
    family = str(record.get("family"))
    file = folder / MANIFEST
    # A dotted path in a manifest is a name of somebody else's file: nothing is imported by it.
    both_dotted = is_dotted(family) and is_dotted(name)
    if family != name and not both_dotted and not is_alike(family, spec):
        return SourceModel(file, family)
    values = {key: value for key, value in record.items() if key != "family"}
    try:
        args = spec.args_class(**checked_fields(spec.args_class, values, ""))
    except (TypeError, ValueError) as error:
        return SourceModel(file, problem=str(error))
    return SourceModel(file, args=args)


def is_alike(family: str, spec: ModelSpec) -> bool:
    """Return whether a family has the same modules as `spec`, as Llama 2 and 3 have."""
    from titanlite.models.families import SPECS

    return family in SPECS and SPECS[family].args_class is spec.args_class


def differences(there: SourceModel, name: str, args: Any) -> list[str]:
    """Return the keys of `[model]` that differ from a folder's model, a line each.

    name: `model.name`. A vocabulary of None in `args` is not known yet, and not compared.
    """
    if there.family is not None:
        return [f"model.name is {quote(name)} here, {quote(there.family)} there"]
    if there.args is None:
        return [there.problem]
    theirs = deciding(there.args)
    ours = deciding(args)
    if ours.get("vocab_size") is None:
        theirs.pop("vocab_size", None)
        ours.pop("vocab_size", None)
    lines = []
    for field in {**ours, **theirs}:
        here, at_source = ours.get(field), theirs.get(field)
        if here != at_source:
            lines.append(f"{key_of(field)} is {_shown(here)} here, {_shown(at_source)} there")
    return lines


def key_of(field: str) -> str:
    """Return the key that sets a field of a model's arguments."""
    return f"model.{field}" if field in OWN_KEYS else f"model.overrides.{field}"


def remedy(there: SourceModel, spec: ModelSpec) -> str:
    """Return how `[model]` becomes the model of a folder."""
    if there.family is not None and is_dotted(there.family):
        return (
            "that name is code that its author names: look at it first, and name a copy of yours "
            "as model.name"
        )
    if there.family is not None:
        return f"set model.name = {quote(there.family)}"
    if there.args is not None and spec.name != "hf":
        return 'model.flavor = "from_folder" takes the shape from there'
    if spec.name == "hf":
        return f"model.hf_config = {quote(str(there.file))} is that model"
    return ""


def _shown(value: Any) -> str:
    if isinstance(value, Scaling):
        value = value.as_table()
    return "none" if value is None else quote(value)
