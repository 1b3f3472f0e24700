"""The keys of all sections as data: type in words, default, meaning; and the check of one value."""

from __future__ import annotations

import ast
import math
import os
import sys
import types
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import msgspec
from msgspec.structs import FieldInfo, fields

from titanlite.config.errors import Problem, nearest
from titanlite.config.extensions import ANCHORED
from titanlite.config.sections import Config
from titanlite.config.toml import quote
from titanlite.config.value_types import Section, paths


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
        """The type and the allowed values in words."""
        return describe(self.type)

    @property
    def description(self) -> str:
        """The text under the field."""
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
    if table != name and table in keys() and keys()[table].is_table:
        return table
    return None


def type_of(name: str) -> Any:
    """Return the type of a key or of a free table's entry."""
    table = table_of(name)
    if table is None:
        return keys()[name].type
    return get_args(keys()[table].type)[1]


@cache
def _classes(module: str) -> dict[str, list[ast.stmt]]:
    """Return the classes of a module with the statements in them."""
    tree = ast.parse(Path(str(sys.modules[module].__file__)).read_text(encoding="utf-8"))
    return {node.name: node.body for node in tree.body if isinstance(node, ast.ClassDef)}


@cache
def descriptions(section: type[Section]) -> dict[str, str]:
    """Return field → the text under it in the class's source, on one line."""
    body = _classes(section.__module__)[section.__name__]
    found = {}
    for node, below in zip(body, body[1:], strict=False):
        if not (isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)):
            continue
        if isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant):
            found[node.target.id] = " ".join(str(below.value.value).split())
    return found


def may_differ(name: str, old: Any, new: Any) -> bool:
    """Return whether hosts of one run may have these two values of a key: other paths, or another
    [launch].
    """

    def without_paths(value: Any) -> Any:
        if isinstance(value, list):
            return [*map(without_paths, value)]
        if isinstance(value, dict):
            hidden = paths(inner) if inner else []
            return {field: item for field, item in value.items() if field not in hidden}
        if name in ANCHORED and isinstance(value, str):
            return os.path.basename(value)
        return value

    section, _, field = name.partition(".")
    inner = inner_section(keys()[name].type) if name in keys() else None
    is_path = section in sections() and field in paths(sections()[section])
    return section == "launch" or is_path or without_paths(old) == without_paths(new)


def members(type_: Any) -> tuple[Any, ...]:
    """Return the alternatives of a union (`Annotated` kept), or the type alone."""
    if get_origin(type_) in (Union, types.UnionType):
        return tuple(part for arg in get_args(type_) for part in members(arg))
    return (type_,)


def base(type_: Any) -> Any:
    """Return the type without its limits."""
    return get_args(type_)[0] if get_origin(type_) is Annotated else type_


def choices(type_: Any) -> list[Any]:
    """Return the values that a type lists one by one."""
    listed = [
        value for part in members(type_) if get_origin(part) is Literal for value in get_args(part)
    ]
    return listed + names_beside_paths(type_)


def names_beside_paths(type_: Any) -> list[str]:
    """Return the names that a type takes besides dotted paths (`dotted_or`)."""
    metas = [
        meta.extra or {} for part in members(type_) for meta in getattr(part, "__metadata__", ())
    ]
    return [name for extra in metas for name in extra.get("choices", ())]


def inner_section(type_: Any) -> type[Section] | None:
    """Return the section of which a type lists tables, or that it is."""
    parts = (type_, *get_args(type_))
    return next(
        (part for part in parts if isinstance(part, type) and issubclass(part, Section)), None
    )


_PLAIN = {bool: "true or false", int: "an integer", float: "a number", str: "a string"}
_MANY = {int: "integers", float: "numbers", str: "strings"}
_LIMITS = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<"}


def describe(type_: Any) -> str:
    """Return a type in words: `an integer >= 1`, `one of "a", "b"`, `a list of strings`."""
    return " or ".join(_describe(part) for part in members(type_) if part is not type(None))


def _describe(part: Any) -> str:
    kind = base(part)
    metas = getattr(part, "__metadata__", ())
    words = [meta.extra["words"] for meta in metas if "words" in (meta.extra or {})]
    if words:
        return str(words[0])
    if get_origin(kind) is Literal:
        values = [quote(value) for value in get_args(kind)]
        if len(values) == 1:
            return values[0]
        return f"one of {', '.join(values)}"
    if get_origin(kind) is list:
        (item,) = get_args(kind)
        return _describe_list(item)
    if get_origin(kind) is dict:
        return "a table"
    return f"{_PLAIN.get(kind, 'a value')} {' and '.join(_bounds(metas))}".rstrip()


def _describe_list(item: Any) -> str:
    """Return the type of a list in words. item: the type of its items."""
    if section := inner_section(item):
        return f"an array of tables with {', '.join(section.__struct_fields__)}"
    if get_origin(item) is Literal:
        return f"a list of {', '.join(map(quote, get_args(item)))}"
    if item in _MANY:
        return f"a list of {_MANY[item]}"
    return f"a list whose items are each {describe(item)}"


def _bounds(metas: Sequence[Any]) -> list[str]:
    """Return the bounds of a number, text or list in words: `>= 1`, `that is not empty`."""
    found = []
    for meta in metas:
        for limit, sign in _LIMITS.items():
            number = getattr(meta, limit)
            if number is not None:
                found.append(f"{sign} {number}")
    if any(meta.min_length for meta in metas):
        found.append("that is not empty")
    return found


def check(type_: Any, value: Any, path: str = "") -> list[Problem]:
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
    code = _misfit(type_, value)
    if code is None:
        return []
    text = quote(value)
    if len(text) > 80:
        text = f"{text[:77]}…"
    message = f"expected {describe(type_)}, got {text}"
    return [Problem("", path, message, _hint(type_, value), code=code)]


def _misfit(type_: Any, value: Any) -> str | None:
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
    return not check(type_, value)


def _finite(value: Any) -> bool:
    if isinstance(value, dict):
        return all(map(_finite, value.values()))
    if isinstance(value, list):
        return all(map(_finite, value))
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
    meaning = descriptions(section) if missing else {}
    return found + [
        Problem("", f"{path}.{n}", "is missing", meaning[n], code="missing") for n in missing
    ]


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
