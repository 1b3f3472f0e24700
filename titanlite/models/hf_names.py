"""Names of Hugging Face's tensors, and entries of its JSON files."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

#: The head's name in Hugging Face's files; those of a tied model may leave it out.
HF_HEAD = "lm_head.weight"
#: Values that older exports carry and that follow from the config.
_DERIVED = re.compile(r"(.*\.rotary_emb\.inv_freq|rope\.freqs)")
#: Name of one tensor in Hugging Face's files, or the names of those that ours is the stack of.
#: An entry of the stack with several names has the rows of one after those of the other.
HFName = str | tuple[str, ...] | tuple[tuple[str, ...], ...]


def as_names(name: HFName) -> tuple[str, ...]:
    """Return Hugging Face's tensors that one of ours consists of, in order."""
    if isinstance(name, str):
        return (name,)
    found: list[str] = []
    for entry in name:
        found.extend([entry] if isinstance(entry, str) else entry)
    return tuple(found)


def parts_of_entry(name: HFName) -> int:
    """Return the number of Hugging Face's tensors in a stack's entry, or 1."""
    return 1 if isinstance(name, str) or isinstance(name[0], str) else len(name[0])


def pieces_of(tensor: Tensor, name: HFName) -> dict[str, Tensor]:
    """Return Hugging Face's tensors of one of ours, without a copy."""
    if isinstance(name, str):
        return {name: tensor}
    parts = parts_of_entry(name)
    pieces = [piece for entry in tensor for piece in entry.chunk(parts)]
    return dict(zip(as_names(name), pieces, strict=True))


def is_derived(name: str) -> bool:
    """Return whether a tensor follows from the config and is no weight."""
    return _DERIVED.fullmatch(name) is not None


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
    """Return an entry of a foreign JSON file, of the type `kind`; an integer also fits a float.

    default: for a missing or null entry; None: it is required. Raises ValueError naming the entry.
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
    """Return a list of strings, empty where it is missing. Raises ValueError naming the entry."""
    found: list[Any] = entry_of(config, name, list, [])
    if not all(isinstance(item, str) for item in found):
        raise ValueError(f"{name} is {found!r:.80}, expected a list of strings")
    return found
