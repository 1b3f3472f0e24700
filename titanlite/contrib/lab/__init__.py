"""Experiments around runs: sweeps, ladders, checks of muP."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from titanlite.config.aliases import key_of
from titanlite.config.errors import unfit
from titanlite.config.raw_values import command_line_entries


def refuse_keys(flags: Sequence[str], hints: Mapping[str, str]) -> None:
    """Raise ConfigError for a flag of a key that a command sets itself. hints: key -> what to use
    instead.
    """
    for entry in command_line_entries(flags)[0]:
        if hint := hints.get(key_of(entry.name)):
            raise unfit(entry.name, "cannot be set on this command line", hint)
