"""Experiments around runs: sweeps, ladders, checks of muP."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from titanlite.config.aliases import key_of
from titanlite.config.errors import ConfigError, Problem
from titanlite.config.raw_values import command_line_entries


def refuse_keys(flags: Sequence[str], hints: Mapping[str, str]) -> None:
    """Raise ConfigError for flags of keys that a command sets itself. hints: key -> what to use
    instead.
    """
    names = [entry.name for entry in command_line_entries(flags)[0]]
    keys = {name: key_of(name) for name in names}
    if found := [(name, hints[key]) for name, key in keys.items() if key in hints]:
        raise ConfigError(
            [
                Problem("does-not-fit", name, "cannot be set here", hint, "command line")
                for name, hint in found
            ]
        )
