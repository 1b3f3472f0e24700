"""Names of Hugging Face's tensors, and entries of its JSON files."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Set
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
        parts = []
        for what, names in differences:
            if names:
                more = ", …" if len(names) > 3 else ""
                parts.append(f"{len(names)} {what} ({', '.join(names[:3])}{more})")
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
