"""The keys of all sections as data, and the check of one value."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from typing import Any, get_args, get_origin

import msgspec
from msgspec.structs import FieldInfo, fields

from titanlite.config.errors import Problem, nearest
from titanlite.config.key_types import base, choices, inner_section, members, names_beside_paths
from titanlite.config.run_sections import Section
from titanlite.config.sections import Config
from titanlite.config.toml import quote


@dataclass(frozen=True)
class Key:
    """One `section.field`."""

    section: str
    field: str
    #: The type with its limits, as `Annotated[int, Meta(ge=1)] | None`.
    type: Any
    default: Any
    required: bool
    owner: type[Section]

    @classmethod
    def all_of(cls, section: str, owner: type[Section]) -> list[Key]:
        """Return the keys of a section; a required one has the default None."""

        def default(info: FieldInfo) -> Any:
            return info.default_factory() if callable(info.default_factory) else info.default

        rows = [
            (i.name, i.type, None if i.required else default(i), i.required) for i in fields(owner)
        ]
        return [cls(section, *row, owner) for row in rows]

    @property
    def name(self) -> str:
        return f"{self.section}.{self.field}"

    @property
    def expected(self) -> str:
        """The type and the allowed values in words."""
        from titanlite.config.descriptions import describe

        return describe(self.type)

    @property
    def description(self) -> str:
        """The text under the field."""
        from titanlite.config.descriptions import descriptions

        return descriptions(self.owner)[self.field]

    @property
    def is_table(self) -> bool:
        """Whether it is a free table: each entry is a separate value, with its own source."""
        return get_origin(self.type) is dict


@cache
def sections() -> dict[str, type[Section]]:
    """Return section name → class, in order."""
    return {info.name: info.type for info in fields(Config)}


@cache
def keys() -> dict[str, Key]:
    """Return every key by its full name, in order."""
    return {key.name: key for name, owner in sections().items() for key in Key.all_of(name, owner)}


def table_of(name: str) -> str | None:
    """Return the free table that a dotted name lies in: `model.overrides` for
    `model.overrides.n_layers`.
    """
    table = ".".join(name.split(".", 2)[:2])
    return table if table != name and table in keys() and keys()[table].is_table else None


def type_of(name: str) -> Any:
    """Return the type of a key or of a free table's entry."""
    table = table_of(name)
    return get_args(keys()[table].type)[1] if table else keys()[name].type


def check(type_: Any, value: Any, path: str = "") -> list[Problem]:
    """Return all that is wrong with a value for a type, without places; the key is the path inside:
    `[1].weight`.
    """
    section = inner_section(type_)
    if section is not None and isinstance(value, list):
        tables = ((f"{path}[{i}]", item) for i, item in enumerate(value) if isinstance(item, dict))
        if found := [
            problem for inner, table in tables for problem in _check_table(section, table, inner)
        ]:
            return found
    if (code := _misfit(type_, value)) is None:
        return []
    from titanlite.config.descriptions import describe

    text = quote(value)
    message = f"expected {describe(type_)}, got {text if len(text) <= 80 else f'{text[:77]}…'}"
    return [Problem("", path, message, _hint(type_, value), code=code)]


def _misfit(type_: Any, value: Any) -> str | None:
    """Return the code of what is wrong with a value as a whole."""
    try:
        msgspec.convert(value, type_)
    except msgspec.ValidationError as error:
        if ", got `" in str(error):
            return "wrong-type"
        return (
            "unknown-value" if "enum" in str(error) or names_beside_paths(type_) else "out-of-range"
        )
    refused = [
        m.extra["refused"]
        for m in getattr(type_, "__metadata__", ())
        if "refused" in (m.extra or {})
    ]
    return "out-of-range" if value in refused or not _finite(value) else None


def fits(type_: Any, value: Any) -> bool:
    """Return whether a value is right for a type."""
    return not check(type_, value)


def _finite(value: Any) -> bool:
    if isinstance(value, (list, dict)):
        return all(map(_finite, value.values() if isinstance(value, dict) else value))
    return not isinstance(value, float) or math.isfinite(value)


def _check_table(section: type[Section], table: dict[str, Any], path: str) -> list[Problem]:
    infos = {info.name: info for info in fields(section)}
    found: list[Problem] = []
    for name, value in table.items():
        if name in infos:
            found += check(infos[name].type, value, f"{path}.{name}")
        else:
            close = nearest(name, infos)
            hint = f"nearest: {close[0]}" if close else f"known: {', '.join(infos)}"
            found.append(Problem("", f"{path}.{name}", "unknown key", hint, code="unknown-key"))
    missing = [name for name, info in infos.items() if info.required and name not in table]
    if missing:
        from titanlite.config.descriptions import descriptions

        meaning = descriptions(section)
        for name in missing:
            problem = Problem("", f"{path}.{name}", "is missing", meaning[name], code="missing")
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
