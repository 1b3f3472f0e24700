"""Keys of torchtitan without a counterpart here, and the table of all other names.

A key without a counterpart is accepted with the values that switch it off. So a file that only
spells out defaults still loads. Any other value is refused with the reason, unless the feature that
the key belongs to is off.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import msgspec

#: "later": of torchtitan 0.2.x, for keys that the files of 2024 had under another one. "older": the
#: oldest names, and later names of keys that the files of 2024 did not have. Both give the key
#: here, perhaps with a conversion of `titanlite.config.aliases`. "values": key → other value → the
#: value here. "notes": how that differs. "refused": key → value → why it is not taken.
#: "unsupported": reason → key → the values that switch it off. "switches": such a key, or how its
#: name begins → the key that its feature is switched on by. "converters": an entry of
#: `model.converters` → why it is not taken. "other_trainers": name → the key here. "gone": a key of
#: an earlier version → what does its work now.
NAMES: dict[str, Any] = msgspec.json.decode(Path(__file__).with_name("names.json").read_bytes())


class Unsupported(NamedTuple):
    """A key that is known but does nothing."""

    #: The values that change nothing; the first is torchtitan's default.
    off: tuple[Any, ...]
    reason: str
    #: The key that switches its feature on: before that no value of this one matters. "": there is
    #: none. A switch that is no key of titanlite's is never on in a config that loads.
    switch: str

    @property
    def type(self) -> Any:
        return list[str] if isinstance(self.off[0], list) else type(self.off[0])

    def is_off(self, value: Any) -> bool:
        """Return whether a value switches it off. A number is no boolean, though 0 == False."""
        return any(type(value) is type(off) and value == off for off in self.off)


UNSUPPORTED: dict[str, Unsupported] = {
    name: Unsupported(
        tuple(off),
        reason,
        next(
            (
                switch
                for start, switch in NAMES["switches"].items()
                if name.startswith(start) and name != switch
            ),
            "",
        ),
    )
    for reason, keys in NAMES["unsupported"].items()
    for name, off in keys.items()
}
