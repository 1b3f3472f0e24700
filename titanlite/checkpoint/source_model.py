"""The model that a folder of weights describes, and how another model differs from it.

No torch here.

Only small JSON files are read: Hugging Face's config.json, Meta's params.json, or the manifest of a
checkpoint. So a config is compared with its weights before any text is read. A run can also take
its shape from a folder.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from titanlite.checkpoint.hf_files import HF_CONFIG, META_CONFIG, META_FILES, is_torchtitan
from titanlite.checkpoint.manifest import FILE as MANIFEST
from titanlite.checkpoint.manifest import (
    CheckpointError,
    Manifest,
    find,
    parse_manifest,
    root_of,
    step_folder,
    step_of,
)
from titanlite.checkpoint.paths import AnyPath
from titanlite.config.toml import quote
from titanlite.models.families import builtin_family
from titanlite.models.fields import checked_fields, deciding
from titanlite.models.hf_names import entry_of
from titanlite.models.llama import LLAMA3, LlamaArgs
from titanlite.models.rope_scaling import RopeScaling, Scaling
from titanlite.models.spec import ModelSpec
from titanlite.utils import is_dotted, parse_json

#: Names of Meta's params.json that are fields of `LlamaArgs`.
META_NAMES = (
    "dim",
    "n_layers",
    "n_heads",
    "n_kv_heads",
    "multiple_of",
    "ffn_dim_multiplier",
    "norm_eps",
)
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
    #: Fields that the file does not tell.
    unknown: frozenset[str] = frozenset()

    @property
    def kind(self) -> str:
        """The name of the file, for messages."""
        return self.file.name


def read_model(path: AnyPath, name: str, spec: ModelSpec) -> SourceModel | None:
    """Return the model that `path` describes, as a model of the family `spec`.

    path: as for `checkpoint.initial_load_path`; name: `model.name` of the run. None: the path
    describes no model, as a file of tensors alone, or a checkpoint of a program of one's own.

    Raises CheckpointError for a file that cannot be read, and StoreError for a store that cannot be
    asked.
    """
    folder = path.parent if isinstance(path, Path) and path.is_file() else path
    has_hf = (folder / HF_CONFIG).is_file()
    if isinstance(folder, Path):
        has_meta = (folder / META_CONFIG).is_file()
        if has_meta and (any(folder.glob(META_FILES)) or not has_hf):
            return from_meta(folder / META_CONFIG, read_json(folder / META_CONFIG), spec)
    if has_hf:
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
    family = builtin_family(content)
    if family is not None and _is_decoder(spec) and not is_alike(family, spec):
        return SourceModel(file, family)
    try:
        return SourceModel(file, args=spec.args_from_hf(content))
    except ValueError as error:
        return SourceModel(file, problem=str(error))


def from_meta(file: AnyPath, content: Mapping[str, Any], spec: ModelSpec) -> SourceModel:
    """Return the model of Meta's params.json, which leaves some of it to the tensors."""
    if spec.args_class is not LlamaArgs:
        return SourceModel(file, "llama3")
    try:
        args = meta_args(content)
    except ValueError as error:
        return SourceModel(file, problem=str(error))
    # Only the tensors tell whether the head is tied.
    unknown = {"tied"}
    if not {"multiple_of", "ffn_dim_multiplier"} & content.keys():
        # Files that some programs write name no width.
        unknown.add("ffn_dim")
    return SourceModel(file, args=args, unknown=frozenset(unknown))


def meta_args(content: Mapping[str, Any]) -> LlamaArgs:
    """Return the arguments that Meta's params.json describes.

    The vocabulary is None where the file leaves it to the tokenizer. Raises ValueError for a model
    with experts or quantised weights, and for entries of a wrong type.
    """
    if unknown := sorted({"moe_args", "quantization_args", "vision_chunk_size"} & content.keys()):
        raise ValueError(f"it has {unknown[0]}: such models are not read")
    given = {name: content[name] for name in META_NAMES if content.get(name) is not None}
    given = checked_fields(LlamaArgs, given, "")
    if missing := [name for name in ("dim", "n_layers", "n_heads") if name not in given]:
        raise ValueError(f"{missing[0]} is missing")
    vocabulary = entry_of(content, "vocab_size", int, -1)
    # params.json does not tell the RoPE and the tied head of Llama 3.2 from those of 3.1.
    published = _published(given["dim"], given["n_layers"])
    scaling = RopeScaling(factor=8.0)
    if published is not None and isinstance(published.rope_scaling, RopeScaling):
        scaling = published.rope_scaling
    scaling = replace(scaling, factor=entry_of(content, "rope_scale_factor", float, scaling.factor))
    return LlamaArgs(
        **given,
        vocab_size=vocabulary if vocabulary > 0 else None,
        # Llama 2's does not say it.
        rope_theta=entry_of(content, "rope_theta", float, 10000.0),
        rope_scaling=scaling if entry_of(content, "use_scaled_rope", bool, False) else None,
        tied=bool(published and published.tied),
    )


def _published(dim: int, n_layers: int) -> LlamaArgs | None:
    """Return the Llama 3 of these sizes, with the RoPE of its latest version."""
    known = {(one.dim, one.n_layers): one for one in LLAMA3.flavors.values()}
    return known.get((dim, n_layers))


def from_checkpoint(path: AnyPath, name: str, spec: ModelSpec) -> SourceModel | None:
    """Return the model of a checkpoint, or of the newest in a run or its folder of checkpoints."""
    folder, manifest = _checkpoint_in(path)
    record = manifest.config.get("model")
    if not isinstance(record, dict):
        # Of an early version.
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


def _checkpoint_in(path: AnyPath) -> tuple[AnyPath, Manifest]:
    """Return the folder of a checkpoint and its manifest: `path`, or the newest valid one in it."""
    if step_of(path) is not None:
        return path, parse_manifest(path)
    root = root_of(path)
    found = find(root).valid(root)
    return step_folder(root, found.step), found


def _is_decoder(spec: ModelSpec) -> bool:
    """Return whether it is a built-in family that takes files of one model_type alone."""
    from titanlite.models.families import SPECS

    return spec.name != "hf" and SPECS.get(spec.name) is spec


def is_alike(family: str, spec: ModelSpec) -> bool:
    """Return whether a built-in family has the same modules as `spec`: Llama 2 and 3 differ in
    their sizes alone.
    """
    from titanlite.models.families import SPECS

    return family in SPECS and SPECS[family].args_class is spec.args_class


def differences(there: SourceModel, name: str, args: Any) -> list[str]:
    """Return the keys of `[model]` that differ from the model of a folder, a line each.

    name: `model.name`. args: those of the run; a vocabulary of None is not known yet, and not
    compared.
    """
    if there.family is not None:
        return [f"model.name is {quote(name)} here, {quote(there.family)} there"]
    if there.args is None:
        return [there.problem]
    theirs = deciding(there.args)
    ours = deciding(args)
    skipped = set(there.unknown)
    if theirs.get("vocab_size") is None or ours.get("vocab_size") is None:
        skipped.add("vocab_size")
    lines = []
    for field in {**ours, **theirs}:
        here, at_source = ours.get(field), theirs.get(field)
        if field not in skipped and here != at_source:
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
