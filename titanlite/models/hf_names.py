"""Names of Hugging Face's tensors, and their families."""

from __future__ import annotations

import contextlib
import functools
import math
import re
from collections.abc import Mapping, Set
from dataclasses import replace
from typing import Any

#: The head's name in Hugging Face's files; those of a tied model may leave it out.
HF_HEAD = "lm_head.weight"
#: Values that older exports carry and that follow from the config.
_DERIVED = re.compile(r"(.*\.rotary_emb\.inv_freq|rope\.freqs)")
#: Name of one tensor in Hugging Face's files, or the names of those that ours is the stack of.
HFName = str | tuple[str, ...]


def as_names(name: HFName) -> tuple[str, ...]:
    """Return the names of Hugging Face's tensors that one of ours consists of."""
    return (name,) if isinstance(name, str) else name


def is_derived(name: str) -> bool:
    """Return whether a tensor of Hugging Face's files follows from the config, and is no weight."""
    return _DERIVED.fullmatch(name) is not None


def compare_names(wanted: Set[str], given: Set[str]) -> None:
    """Raise ValueError unless the names are the same."""
    if wanted != given:
        differences = (("missing", sorted(wanted - given)), ("unknown", sorted(given - wanted)))
        parts = [
            f"{len(names)} {what} ({', '.join(names[:3])}{', …' if len(names) > 3 else ''})"
            for what, names in differences
            if names
        ]
        raise ValueError(f"these weights are not of this model: {' and '.join(parts)}")


#: Type of an entry of config.json → its name for people.
_KINDS: dict[type, str] = {
    int: "an integer",
    float: "a number",
    bool: "true or false",
    str: "a string",
    list: "a list",
    dict: "a table",
}


def entry_of(config: Mapping[str, Any], name: str, kind: type, default: Any = None) -> Any:
    """Return an entry of somebody else's JSON file, which must be of the type `kind`; an integer
    also fits a float.

    default: for a file without the entry, or with null; None: the entry must be there.
    Raises ValueError naming the entry.
    """
    value = config.get(name)
    if value is None and default is not None:
        return default
    if name not in config:
        raise ValueError(f"{name} is missing")
    if kind is float and type(value) is int:
        value = float(value)
    is_endless = isinstance(value, float) and not math.isfinite(value)
    if type(value) is not kind or is_endless:
        raise ValueError(f"{name} is {value!r:.80}, expected {_KINDS[kind]}")
    return value


def texts_of(config: Mapping[str, Any], name: str) -> list[str]:
    """Return an entry that is a list of strings; empty where it is missing.

    Raises ValueError naming the entry.
    """
    found: list[Any] = entry_of(config, name, list, [])
    if not all(isinstance(item, str) for item in found):
        raise ValueError(f"{name} is {found!r:.80}, expected a list of strings")
    return found


@functools.cache
def _model_types() -> dict[str, str]:
    """Return `model_type` of Hugging Face's → the built-in family; of those with the same, the
    last.
    """
    from titanlite.models import SPECS

    known: dict[str, str] = {}
    for name, spec in SPECS.items():
        with contextlib.suppress(
            ValueError, StopIteration
        ):  # a model without this format, or without flavors
            args = replace(next(iter(spec.flavors.values())), vocab_size=1)
            known[spec.hf_config(args)["model_type"]] = name
    return known


def builtin_family(config: Mapping[str, Any]) -> str | None:
    """Return the built-in family of a config.json, by its `model_type`; None: there is none."""
    return _model_types().get(str(config.get("model_type")))


def family_of(config: Mapping[str, Any]) -> tuple[str, Any]:
    """Return the built-in family, by `model_type`, and the arguments that a config.json of Hugging
    Face describes.

    Other causal models of `transformers` are of the family hf. Raises ValueError for a model that
    titanlite lacks.
    """
    from titanlite.models import SPECS

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
