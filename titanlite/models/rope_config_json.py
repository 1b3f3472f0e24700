"""The rotary positions of config.json: `rope_parameters` of `transformers` 5, `rope_scaling` of 4.

`titanlite.models.rope_scaling` has the scalings. No torch here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from titanlite.models.hf_names import entry_of
from titanlite.models.rope_scaling import (
    KINDS,
    RopeScaling,
    Scaling,
    YarnScaling,
)

#: Kinds of attention in `layer_types`.
FULL = "full_attention"
WINDOW = "sliding_attention"
_ORIGINAL = "original_max_position_embeddings"
_POSITIONS = "max_position_embeddings"
_PARTIAL = "partial_rotary_factor"
#: Entries of a table that are left out where they have these values, the defaults.
_DEFAULTS = {"beta_fast": 32.0, "beta_slow": 1.0, "truncate": True}


def rope_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the rotary table; of both names `transformers` takes the older one.

    Raises ValueError for one table per kind of layer.
    """
    older: dict[str, Any] = entry_of(config, "rope_scaling", dict, {})
    found = older or dict(entry_of(config, "rope_parameters", dict, {}))
    nested = [name for name, value in found.items() if isinstance(value, dict)]
    if nested:
        raise ValueError(
            f"rope_parameters has a table for {nested[0]!r}; all layers here have the same "
            "rotary positions"
        )
    return found


def read_scaling(config: Mapping[str, Any]) -> Scaling | None:
    """Return the scaling of a config.json, ignoring what `transformers` ignores.

    Raises ValueError for an unknown scaling.
    """
    rope = rope_of(config)
    name = entry_of(rope, "rope_type", str, entry_of(rope, "type", str, "default"))
    if name == "default":
        return None
    if name not in KINDS:
        known = ", ".join(map(repr, KINDS))
        raise ValueError(f"rope_type is {name!r}; there is 'default', {known} here")
    kind = KINDS[name]
    partial = rope.get(_PARTIAL, config.get(_PARTIAL))
    if partial not in (None, 1):
        raise ValueError(f"{_PARTIAL} is {partial!r}; all of a head's pairs rotate here")
    if kind is RopeScaling:
        for needed in ("factor", "low_freq_factor", "high_freq_factor"):
            entry_of(rope, needed, float)
    table: dict[str, Any] = {}
    for one in fields(kind):
        if one.init and rope.get(one.name) is not None:
            table[one.name] = rope[one.name]
    if kind in (RopeScaling, YarnScaling):
        # The length before scaling, as `transformers` reads it.
        places = [place for place in (config, rope) if place.get(_ORIGINAL) is not None]
        if places:
            table[_ORIGINAL] = entry_of(places[0], _ORIGINAL, int)
        else:
            table[_ORIGINAL] = entry_of(config, _POSITIONS, int)
        if kind is YarnScaling and places and "factor" not in table:
            table["factor"] = entry_of(config, _POSITIONS, int) / table[_ORIGINAL]
    return kind.of_table(table)


def written_rope(args: Any) -> dict[str, Any]:
    """Return the entries of config.json for `transformers` 5 and 4."""
    scaling: Scaling | None = args.rope_scaling
    table: dict[str, Any] = {"rope_type": "default"}
    entries = {}
    if scaling is not None:
        table = {"rope_type": scaling.kind, **scaling.as_table()}
        if isinstance(scaling, RopeScaling):
            table[_ORIGINAL] = table.pop("original_context")
        for name, default in _DEFAULTS.items():
            if table.get(name) == default:
                table.pop(name)
        entries["rope_scaling"] = table
    table = {**table, "rope_theta": args.rope_theta}
    local = getattr(args, "local_theta", None)
    if local is not None:
        table = {FULL: table, WINDOW: {"rope_type": "default", "rope_theta": local}}
    # Without rope_theta `transformers` 4 would take 10,000 without a word.
    return {"rope_parameters": table, "rope_theta": args.rope_theta, **entries}
