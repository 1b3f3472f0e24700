"""The built-in model families. Each is imported when it is asked for. No torch here."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from titanlite.config.errors import Problem
from titanlite.config.import_objects import resolve_as
from titanlite.models.spec import ModelSpec, ShapeError, names_like, shown
from titanlite.utils import is_dotted

#: Value of `model.name` → file of the family, and the name of its spec there.
_FAMILIES = {
    "llama2": "llama:LLAMA2",
    "llama3": "llama:LLAMA3",
    "mistral": "mistral:SPEC",
    "mixtral": "mixtral:SPEC",
    "qwen3": "qwen3:SPEC",
    "qwen3_moe": "qwen3_moe:SPEC",
    "olmo2": "olmo2:SPEC",
    "olmo3": "olmo3:SPEC",
    "gemma3": "gemma3:SPEC",
    "deepseek_v3": "deepseek_v3:SPEC",
    "gpt_oss": "gpt_oss:SPEC",
    "llama4": "llama4:SPEC",
    "hf": "hf:SPEC",
}


class _Families(Mapping[str, ModelSpec]):
    """Name → spec; names are known without importing the families."""

    def __getitem__(self, name: str) -> ModelSpec:
        module, _, variable = _FAMILIES[name].partition(":")
        spec: ModelSpec = getattr(importlib.import_module(f"titanlite.models.{module}"), variable)
        return spec

    def __iter__(self) -> Iterator[str]:
        return iter(_FAMILIES)

    def __len__(self) -> int:
        return len(_FAMILIES)

    def __contains__(self, name: object) -> bool:
        return name in _FAMILIES


#: The built-in models by `model.name`.
SPECS: Mapping[str, ModelSpec] = _Families()


def get_spec(name: str) -> ModelSpec:
    """Return the spec of a built-in model or a dotted path. Raises ShapeError for other names."""
    if is_dotted(name):
        try:
            return resolve_as(
                name, lambda found: isinstance(found, ModelSpec), "a titanlite.ModelSpec"
            )
        except ValueError as error:
            hint = 'name a ModelSpec as "package.module:NAME" or "./my_model.py:NAME"'
            raise ShapeError(Problem("model", "name", str(error), hint)) from error
    if name not in SPECS:
        raise ShapeError(
            Problem("model", "name", f"no model {shown(name)}", names_like(name, SPECS))
        )
    return SPECS[name]


@functools.cache
def _model_types() -> dict[str, str]:
    """Return Hugging Face's `model_type` → family; of several with one type, the last."""
    known: dict[str, str] = {}
    for name, spec in SPECS.items():
        for flavor in spec.flavors.values():
            args = replace(flavor, vocab_size=1)
            known[spec.hf_config(args)["model_type"]] = name
        if spec.part_of:
            known[spec.part_of] = name
    return known


def builtin_family(config: Mapping[str, Any]) -> str | None:
    """Return the built-in family of a config.json, by its `model_type`."""
    return _model_types().get(str(config.get("model_type")))


def family_of(config: Mapping[str, Any]) -> tuple[str, Any]:
    """Return the family and the arguments of a config.json: built-in by `model_type`, else hf.

    Raises ValueError for a model that titanlite lacks.
    """
    builtin = builtin_family(config)
    family = builtin or "hf"
    try:
        return family, SPECS[family].args_from_hf(config)
    except ValueError as error:
        if builtin:
            raise
        names = ", ".join(sorted(_model_types()))
        kind = config.get("model_type")
        raise ValueError(
            f"model_type is {kind!r}, and there is no such model here: {names}; {error}"
        ) from error
