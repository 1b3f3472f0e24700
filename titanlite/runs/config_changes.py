"""Differences between two resolved configs."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from titanlite.config.toml import TOMLDecodeError, loads

#: Keys that only name the files of a config.
_NOT_COMPARED = ("job.config_file", "job.extends", "job.dialect")


def config_values(toml: str) -> dict[str, Any]:
    """Return the values of a TOML text by dotted key. Raises TOMLDecodeError."""

    def flatten(table: Mapping[str, Any], lead: str) -> Iterator[tuple[str, Any]]:
        for name, value in table.items():
            if isinstance(value, dict):
                yield from flatten(value, f"{lead}{name}.")
            else:
                yield f"{lead}{name}", value

    return dict(flatten(loads(toml), ""))


def config_changes(old: object, new: object) -> dict[str, str]:
    """Return "old -> new" by key for two TOML texts; empty where one is none.

    Values are shown as in JSON, missing ones as "(not set)".
    """
    if not (isinstance(old, str) and isinstance(new, str)):
        return {}
    try:
        old_values = config_values(old)
        new_values = config_values(new)
    except TOMLDecodeError:
        return {}
    found = {}
    for key in {**old_values, **new_values}:
        before = _shown(old_values, key)
        now = _shown(new_values, key)
        if before != now and key not in _NOT_COMPARED:
            found[key] = f"{before} -> {now}"
    return found


def _shown(values: Mapping[str, Any], key: str) -> str:
    return json.dumps(values[key], default=str) if key in values else "(not set)"
