"""Keys of torchtitan without a counterpart here, and names that other trainers give to keys.

A key without a counterpart is accepted with the values that switch it off. So a file that only
spells out defaults still loads. Any other value is refused with the reason, unless the feature that
the key belongs to is off.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import msgspec

#: Names of other trainers. "later": of torchtitan 0.2.x, for keys that the files of 2024 had under
#: another one. "older": the oldest names, and later names of keys that the files of 2024 did not
#: have. "unsupported": reason → key → the values that switch it off. "switches": such a key, or how
#: its name begins → the key that its feature is switched on by. "converters": an entry of
#: `model.converters` → why it is not taken. "other_models": a `model.name` →
#: why no file of that model is taken, and what to do. "other_trainers": name → the key here.
#: "gone": a key of an earlier version → what does its work now.
NAMES: dict[str, Any] = msgspec.json.decode(Path(__file__).with_name("names.json").read_bytes())


class Unsupported(NamedTuple):
    """A key that is known but does nothing."""

    #: The values that change nothing; the first is torchtitan's default.
    off: tuple[Any, ...]
    reason: str
    #: The key that switches its feature on: before that no value of this one matters. "": there is
    #: none. A switch that is no key of titanlite's is never on in a config that loads.
    switch: str


def _switch_of(name: str) -> str:
    """Return the key that switches on the feature of an unsupported key; "": there is none."""
    for start, switch in NAMES["switches"].items():
        if name.startswith(start) and name != switch:
            return str(switch)
    return ""


UNSUPPORTED: dict[str, Unsupported] = {
    name: Unsupported(tuple(off), reason, _switch_of(name))
    for reason, keys in NAMES["unsupported"].items()
    for name, off in keys.items()
}


def unsupported_type(name: str) -> Any:
    """Return the type of an unsupported key, for reading the command line."""
    off = UNSUPPORTED[name].off[0]
    return list[str] if isinstance(off, list) else type(off)


def is_off(name: str, value: Any) -> bool:
    """Return whether a value switches the key off.

    A number equal to a boolean (0, False) is not taken for one.
    """
    return any(type(value) is type(off) and value == off for off in UNSUPPORTED[name].off)


OTHER_TRAINERS: dict[str, str] = NAMES["other_trainers"]
"""Names that other trainers use → the key here, for the hint under an unknown key."""

OTHER_MODELS: dict[str, list[str]] = NAMES["other_models"]
"""Values of `model.name` in torchtitan's files → why no such file is taken, and what to do."""
