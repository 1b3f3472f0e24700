"""The types of keys, taken apart: alternatives, limits, listed values, tables."""

from __future__ import annotations

import types
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from titanlite.config.run_sections import Section


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
        value
        for part in map(base, members(type_))
        if get_origin(part) is Literal
        for value in get_args(part)
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
