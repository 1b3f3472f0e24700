"""Messages about values that do not fit their types."""

from __future__ import annotations

from typing import Any

from msgspec.structs import fields

from titanlite.config.descriptions import describe, descriptions
from titanlite.config.errors import Problem, nearest
from titanlite.config.key_types import choices, inner_section
from titanlite.config.keys import value_fault
from titanlite.config.toml import quote
from titanlite.config.value_types import Section


def problems_of(type_: Any, value: Any, path: str = "") -> list[Problem]:
    """Return what is wrong with a value, without places; keys are paths inside: `[1].weight`."""
    section = inner_section(type_)
    if section is not None and isinstance(value, list):
        found = []
        for i, item in enumerate(value):
            if isinstance(item, dict):
                found += _check_table(section, item, f"{path}[{i}]")
        if found:
            return found
    code = value_fault(type_, value)
    if code is None:
        return []
    text = quote(value)
    if len(text) > 80:
        text = f"{text[:77]}…"
    message = f"expected {describe(type_)}, got {text}"
    close = nearest(value, map(str, choices(type_))) if isinstance(value, str) else []
    hint = f'did you mean "{close[0]}"?' if close else ""
    return [Problem(code, path, message, hint)]


def _check_table(section: type[Section], table: dict[str, Any], path: str) -> list[Problem]:
    infos = {info.name: info for info in fields(section)}
    found: list[Problem] = []
    for name, value in table.items():
        if name in infos:
            found += problems_of(infos[name].type, value, f"{path}.{name}")
        else:
            close = nearest(name, infos)
            hint = f"nearest: {close[0]}" if close else f"known: {', '.join(infos)}"
            found.append(Problem("unknown-key", f"{path}.{name}", "unknown key", hint))
    missing = [name for name, info in infos.items() if info.required and name not in table]
    if missing:
        meaning = descriptions(section)
        for name in missing:
            problem = Problem("missing", f"{path}.{name}", "is missing", meaning[name])
            found.append(problem)
    return found
