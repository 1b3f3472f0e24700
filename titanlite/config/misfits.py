"""What is wrong with values that do not fit their types, in words."""

from __future__ import annotations

import math
from typing import Any

from msgspec.structs import fields

from titanlite.config.descriptions import describe, descriptions
from titanlite.config.errors import Problem, nearest
from titanlite.config.key_types import base, choices, inner_section, members
from titanlite.config.keys import misfit
from titanlite.config.toml import quote
from titanlite.config.value_types import Section


def problems_of(type_: Any, value: Any, path: str = "") -> list[Problem]:
    """Return all that is wrong with a value for a type, without places; the key is the path inside:
    `[1].weight`.
    """
    section = inner_section(type_)
    if section is not None and isinstance(value, list):
        found = []
        for i, item in enumerate(value):
            if isinstance(item, dict):
                found += _check_table(section, item, f"{path}[{i}]")
        if found:
            return found
    code = misfit(type_, value)
    if code is None:
        return []
    text = quote(value)
    if len(text) > 80:
        text = f"{text[:77]}…"
    message = f"expected {describe(type_)}, got {text}"
    return [Problem(code, path, message, _hint(type_, value))]


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


def _hint(type_: Any, value: Any) -> str:
    """Return the remedy for usual slips."""
    kinds = {base(part) for part in members(type_)}
    if isinstance(value, str):
        if close := nearest(value, map(str, choices(type_))):
            return f'did you mean "{close[0]}"?'
        if bool in kinds and value.lower() in ("true", "false"):
            return f"write it without quotes: {value.lower()}"
        if kinds & {int, float} and _is_number(value):
            return f"write it without quotes: {value}"
    if isinstance(value, float) and int in kinds and value.is_integer():
        return f"write it as an integer: {int(value)}"
    if type(value) in (int, float) and kinds <= {str, type(None)}:
        return f'write it with quotes: "{value}"'
    return ""


def _is_number(text: str) -> bool:
    try:
        return math.isfinite(float(text))
    except ValueError:
        return False
