"""Names of Hugging Face's tensors, and their families."""

from __future__ import annotations

import contextlib
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


def family_of(config: Mapping[str, Any]) -> tuple[str, Any]:
    """Return the built-in family, by `model_type`, and the arguments that a config.json of Hugging Face describes.

    Other causal models of `transformers` are of the family hf. Raises ValueError for a model that titanlite lacks.
    """
    from titanlite.models import SPECS

    known: dict[str, str] = {}
    for name, spec in SPECS.items():
        with contextlib.suppress(ValueError, StopIteration):  # a model without this format, or without flavors
            args = replace(next(iter(spec.flavors.values())), vocab_size=1)
            known[spec.hf_config(args)["model_type"]] = name
    kind = config.get("model_type")
    family = known.get(str(kind), "hf")
    try:
        return family, SPECS[family].args_from_hf(config)
    except ValueError as error:
        if kind in known:
            raise
        names = ", ".join(sorted(known))
        raise ValueError(f"model_type is {kind!r}, and there is no such model here: {names}; {error}") from error
