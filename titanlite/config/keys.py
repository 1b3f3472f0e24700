"""The keys of all sections as data, and the check of one value."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from functools import cache
from typing import Any, get_args, get_origin

import msgspec
from msgspec.structs import FieldInfo, fields

from titanlite.config.key_types import names_beside_paths
from titanlite.config.sections import Config
from titanlite.config.value_types import Section


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
            if info.required:
                return None
            if callable(info.default_factory):
                return info.default_factory()
            return info.default

        found = []
        for info in fields(owner):
            key = cls(section, info.name, info.type, default(info), info.required, owner)
            found.append(key)
        return found

    @property
    def name(self) -> str:
        return f"{self.section}.{self.field}"

    @property
    def expected(self) -> str:
        from titanlite.config.descriptions import describe

        return describe(self.type)

    @property
    def description(self) -> str:
        from titanlite.config.descriptions import descriptions

        return descriptions(self.owner)[self.field]

    @property
    def is_table(self) -> bool:
        """Whether it is a free table: each entry is a separate value, with its own source."""
        return get_origin(self.type) is dict


#: Name of a table's entry, as TOML writes it.
_ENTRY = re.compile(r"[\w-]+|\"(?:[^\"\\]|\\.)*\"")


#: Sections of features of other packages, once a config has named them.
OTHERS: dict[str, type[Section]] = {}


@cache
def sections() -> dict[str, type[Section]]:
    """Return section name → class, in order; those of other packages last."""
    ours = {info.name: info.type for info in fields(Config) if info.name != "others"}
    return {**ours, **OTHERS}


@cache
def keys() -> dict[str, Key]:
    """Return every key by its full name, in order."""
    return {key.name: key for name, owner in sections().items() for key in Key.all_of(name, owner)}


@cache
def tables() -> list[str]:
    """Return the keys that are free tables."""
    return [name for name, key in keys().items() if key.is_table]


def table_of(name: str) -> str | None:
    """Return a name's free table: `model.overrides` for `model.overrides.n_layers`."""
    table = ".".join(name.split(".", 2)[:2])
    is_entry = _ENTRY.fullmatch(name, len(table) + 1) is not None
    return table if is_entry and table in tables() else None


def type_of(name: str) -> Any:
    """Return the type of a key or of a free table's entry."""
    table = table_of(name)
    if table is None:
        return keys()[name].type
    return get_args(keys()[table].type)[1]


def value_fault(type_: Any, value: Any) -> str | None:
    """Return the code of what is wrong with a value as a whole."""
    try:
        msgspec.convert(value, type_)
    except msgspec.ValidationError as error:
        if ", got `" in str(error):
            return "wrong-type"
        if "enum" in str(error) or names_beside_paths(type_):
            return "unknown-value"
        return "out-of-range"
    metas = getattr(type_, "__metadata__", ())
    refused = [meta.extra["refused"] for meta in metas if "refused" in (meta.extra or {})]
    if value in refused or not _finite(value):
        return "out-of-range"
    return None


def fits(type_: Any, value: Any) -> bool:
    """Return whether a value is right for a type."""
    return value_fault(type_, value) is None


def _finite(value: Any) -> bool:
    if isinstance(value, dict):
        return all(map(_finite, value.values()))
    if isinstance(value, list):
        return all(map(_finite, value))
    return not isinstance(value, float) or math.isfinite(value)
