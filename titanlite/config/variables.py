"""Environment variables in values: `${NAME}` stands for the variable's value, `$${` for a literal
`${`.
"""

from __future__ import annotations

import os
import re
from dataclasses import replace
from typing import Any

from titanlite.config.errors import Problem
from titanlite.config.raw_values import Entry

_MARK = re.compile(r"\$(?:(\$\{)|\{([A-Za-z_][A-Za-z0-9_]*)\}|\{)")
_HINT = "set it, or write $${ for a literal ${"


def names_in(value: Any) -> list[str]:
    """Return the names of the variables in a value, each once."""
    if isinstance(value, str):
        found = [match[2] for match in _MARK.finditer(value) if match[2]]
        return list(dict.fromkeys(found))
    if isinstance(value, dict):
        value = list(value.values())
    if not isinstance(value, list):
        return []
    return list(dict.fromkeys(name for item in value for name in names_in(item)))


def is_deferred(key: str) -> bool:
    """Return whether a launcher leaves the variables of a key to the machines of the job.

    It needs the other keys itself.
    """
    return not key.startswith("launch.") and key not in (
        "job.config_file",
        "job.extends",
        "job.dump_folder",
    )


def resolved(entry: Entry, keep_unset: bool) -> tuple[Entry, list[Problem]]:
    """Return an entry with its variables' values, and what is wrong; `raw` is as written.

    keep_unset: leave an unset variable as written.
    """
    names: list[str] = []
    problems: list[Problem] = []

    def replaced(value: Any, path: str = "") -> Any:
        if isinstance(value, list):
            return [replaced(item, f"{path}[{i}]") for i, item in enumerate(value)]
        if isinstance(value, dict):
            return {name: replaced(item, f"{path}.{name}") for name, item in value.items()}
        if isinstance(value, str):
            return _MARK.sub(lambda match: text_of(match, path), value)
        return value

    def text_of(match: re.Match[str], path: str) -> str:
        literal, name = match.groups()
        if literal:
            return str(literal)
        if name and (name in os.environ or keep_unset):
            names.append(name)
            return os.environ.get(name, match[0])
        message = "has ${ without the NAME} of a variable"
        if name:
            message = f"the environment variable {name} is not set"
        problems.append(Problem("variable", entry.name + path, message, _HINT, entry.place(path)))
        return match[0]

    value = replaced(entry.value)
    source = replace(entry.source, variables=tuple(dict.fromkeys(names)))
    return replace(entry, value=value, source=source, raw=entry.value if names else None), problems
