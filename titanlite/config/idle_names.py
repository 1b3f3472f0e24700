"""Keys of torchtitan without a counterpart here, once the values of all layers are known."""

from __future__ import annotations

from typing import TYPE_CHECKING

from titanlite.config.entries import Entry
from titanlite.config.errors import Problem
from titanlite.config.keys import keys
from titanlite.config.toml import quote
from titanlite.config.unsupported_keys import UNSUPPORTED, is_off

if TYPE_CHECKING:
    from titanlite.config.load import Layers


def settle(layers: Layers) -> None:
    """Refuse the unsupported keys that ask for something, and note those of features that are
    off.
    """
    without_effect: dict[str, list[str]] = {}
    for name, entry in layers.idle.items():
        if is_off(name, entry.value):
            continue
        switch = UNSUPPORTED[name].switch
        if switch and not _is_on(layers, switch):
            without_effect.setdefault(switch, []).append(name)
        else:
            layers.problems.append(_refusal(entry))
    for switch, names in without_effect.items():
        layers.notes.append(f"no effect, as {switch} leaves it off: {', '.join(names)}")


def _is_on(layers: Layers, switch: str) -> bool:
    """Return whether a switch differs from its default. One that is no key here is refused when it
    is on.
    """
    return switch in keys() and layers.get(switch) != keys()[switch].default


def _refusal(entry: Entry) -> Problem:
    key = UNSUPPORTED[entry.name]
    message = f"{quote(entry.value)} is not supported: {key.reason}"
    hint = f"remove it, or leave it at {' or '.join(map(quote, key.off))}"
    return Problem("unsupported", entry.name, message, hint, entry.source.place)
