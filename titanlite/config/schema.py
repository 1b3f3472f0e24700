"""The dialect as data: one `Key` per field of a section, with its type in words."""

from __future__ import annotations

import math
import types
import typing
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import annotated_types
from pydantic import ValidationError
from pydantic.fields import FieldInfo

from titanlite.config.dialect import Dialect
from titanlite.config.errors import nearest
from titanlite.config.sections.base import InWords, Section


@dataclass(frozen=True)
class Key:
    """One `section.field` of the dialect."""

    name: str
    section: str
    field: str
    annotation: Any
    metadata: tuple[Any, ...]
    default: Any
    description: str

    @property
    def expected(self) -> str:
        """The type and the allowed values in words."""
        return describe(self.annotation, self.metadata)

    @property
    def is_table(self) -> bool:
        """A free table: each of its entries is a value of its own, with its own source."""
        return get_origin(self.annotation) is dict

    @property
    def inner(self) -> type[Section] | None:
        """The model of a table, or of the tables of an array, that is this key's value; None for other values."""
        parts = (item for part in members(self.annotation) for item in (get_args(part) or (part,)))
        return next((item for item in parts if isinstance(item, type) and issubclass(item, Section)), None)

    @classmethod
    def of(cls, section: str, field: str, info: FieldInfo) -> Key:
        """The key of a model's field; a field that must be given has no default."""
        default = None if info.is_required() else info.get_default(call_default_factory=True)
        metadata = tuple(info.metadata)
        return cls(f"{section}.{field}", section, field, info.annotation, metadata, default, info.description or "")


NOT_IN_FILES = ("job.config_file",)
"""Keys of the command line alone: a file cannot name itself."""


@lru_cache(maxsize=1)
def sections() -> dict[str, type[Section]]:
    """Section name → model, in the order of `Dialect`."""
    return {name: typing.cast("type[Section]", info.annotation) for name, info in Dialect.model_fields.items()}


@lru_cache(maxsize=1)
def keys() -> dict[str, Key]:
    """Every key by its full name, in order."""
    found: dict[str, Key] = {}
    for section, model in sections().items():
        for field, info in model.model_fields.items():
            found[f"{section}.{field}"] = Key.of(section, field, info)
    return found


def members(annotation: Any) -> tuple[Any, ...]:
    """The alternatives of a union (`Annotated` kept), or the annotation alone."""
    if get_origin(annotation) in (Union, types.UnionType):
        return tuple(part for arg in get_args(annotation) for part in members(arg))
    return (annotation,)


def base(annotation: Any) -> Any:
    """The annotation without `Annotated`."""
    return get_args(annotation)[0] if get_origin(annotation) is Annotated else annotation


_PLAIN = {bool: "true or false", int: "an integer", float: "a number", str: "a string", type(None): "none"}
_MANY = {int: "integers", float: "numbers", str: "strings"}


def describe(annotation: Any, metadata: tuple[Any, ...] = ()) -> str:
    """A type in words: `an integer >= 1`, `one of "a", "b"`, `a list of strings`."""
    parts = [part for part in members(annotation) if part is not type(None)]
    return " or ".join(_describe_one(part, metadata) for part in parts)


def _describe_one(annotation: Any, metadata: tuple[Any, ...]) -> str:
    if get_origin(annotation) is Annotated:
        inner, *extra = get_args(annotation)
        flat = [m for item in extra for m in (item.metadata if isinstance(item, FieldInfo) else [item])]
        return _describe_one(inner, (*flat, *metadata))
    if get_origin(annotation) is Literal:
        values = [quote(value) for value in get_args(annotation)]
        return values[0] if len(values) == 1 else f"one of {', '.join(values)}"
    if get_origin(annotation) is list:
        (item,) = get_args(annotation)
        if isinstance(item, type) and issubclass(item, Section):
            return f"an array of tables with {', '.join(item.model_fields)}"
        if get_origin(item) is Literal:
            return f"a list of {', '.join(quote(v) for v in get_args(item))}"
        if get_origin(item) is list:
            return f"a list of lists of {_MANY[get_args(item)[0]]}"
        return f"a list of {_MANY[item]}" if item in _MANY else f"a list whose items are each {describe(item)}"
    if get_origin(annotation) is dict:
        return "a table"
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return f"a table with {', '.join(annotation.model_fields)}"
    for item in metadata:
        if isinstance(item, InWords):
            return item.text
    limits = _limits(metadata)
    return f"{_PLAIN[annotation]} {limits}" if limits else _PLAIN[annotation]


def _limits(metadata: tuple[Any, ...]) -> str:
    """Bounds in words: `>= 0`, `from 0 to 1`, `that is not empty`."""
    low = high = ""
    for item in metadata:
        if isinstance(item, annotated_types.Ge):
            low = f">= {item.ge}"
        elif isinstance(item, annotated_types.Gt):
            low = f"> {item.gt}"
        elif isinstance(item, annotated_types.Le):
            high = f"<= {item.le}"
        elif isinstance(item, annotated_types.Lt):
            high = f"< {item.lt}"
        elif isinstance(item, annotated_types.MinLen):
            return "that is not empty"
    return " and ".join(part for part in (low, high) if part)


def quote(value: Any) -> str:
    """A value as TOML writes it."""
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        escaped = value.replace("\\", "\\\\").replace('"', '\\"')
        for raw, code in (("\n", "\\n"), ("\r", "\\r"), ("\t", "\\t")):
            escaped = escaped.replace(raw, code)
        return '"' + "".join(c if c.isprintable() else f"\\u{ord(c):04x}" for c in escaped) + '"'
    if isinstance(value, Section):
        value = value.model_dump(exclude_none=True)
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(quote(item) for item in value) + "]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{quote_key(k)} = {quote(v)}" for k, v in value.items()) + "}" if value else "{}"
    if isinstance(value, float) and not math.isfinite(value):
        return "nan" if math.isnan(value) else ("inf" if value > 0 else "-inf")
    if isinstance(value, float):
        # repr of a float is read back by TOML to the same float, and so is an exponent without a point.
        return repr(value)
    return str(value)


def quote_key(name: str) -> str:
    """A key as TOML writes it: bare where it can be."""
    bare = name != "" and all(c.isascii() and (c.isalnum() or c in "-_") for c in name)
    return name if bare else quote(name)


def check_value(key: Key, value: Any) -> list[tuple[str, str, str]]:
    """What is wrong with a value for a key: (path below the key, message, hint); empty when it is right."""
    try:
        sections()[key.section].model_validate({key.field: value})
    except ValidationError as error:
        nested = _nested(key, error)
        return nested or [("", f"expected {key.expected}, got {_got(value)}", _hint(key, value))]
    return []


def _nested(key: Key, error: ValidationError) -> list[tuple[str, str, str]]:
    """Problems inside an array of tables or a table, each with its own path."""
    model = key.inner
    if model is None:
        return []
    found = []
    for entry in error.errors():
        path = [part for part in entry["loc"][1:] if isinstance(part, int) or part in model.model_fields]
        name = entry["loc"][-1]
        if entry["type"] == "extra_forbidden":
            path.append(typing.cast(str, name))
            close = nearest(str(name), model.model_fields)
            hint = f"nearest: {close[0]}" if close else f"known: {', '.join(model.model_fields)}"
            found.append((inner_path(path), "unknown key", hint))
        elif entry["type"] == "missing":
            found.append((inner_path(path), "is missing", model.model_fields[str(name)].description or ""))
        elif isinstance(name, str) and name in model.model_fields:
            info = model.model_fields[name]
            expected = describe(info.annotation, tuple(info.metadata))
            found.append((inner_path(path), f"expected {expected}, got {_got(entry['input'])}", ""))
    return found


def inner_path(parts: Sequence[Any]) -> str:
    """A path inside a value: `[1].weight`."""
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in parts)


def _got(value: Any) -> str:
    kinds = {bool: "", int: "", float: "", str: "the string ", list: "the list ", dict: "the table "}
    text = quote(value)
    if len(text) > 80:
        text = text[:77] + "…"
    return f"{kinds.get(type(value), type(value).__name__ + ' ')}{text}"


def _hint(key: Key, value: Any) -> str:
    """The usual slips, answered."""
    kinds = {base(part) for part in members(key.annotation)}
    choices = [str(c) for part in members(key.annotation) if get_origin(part) is Literal for c in get_args(part)]
    if isinstance(value, str):
        if choices and (close := nearest(value, choices)):
            return f'did you mean "{close[0]}"?'
        if bool in kinds and value.lower() in ("true", "false"):
            return f"write it without quotes: {value.lower()}"
        if kinds & {int, float} and _number(value) is not None:
            return f"write it without quotes: {value}"
    if isinstance(value, float) and int in kinds and value.is_integer():
        return f"write it as an integer: {int(value)}"
    if isinstance(value, (int, float)) and not isinstance(value, bool) and kinds <= {str, type(None)}:
        return f'write it with quotes: "{value}"'
    return ""


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None
