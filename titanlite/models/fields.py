"""Values from a file checked against the fields of a dataclass. No torch here."""

from __future__ import annotations

import math
import typing
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from titanlite.config.errors import Problem
from titanlite.models.spec import ShapeError, names_like, shown

_NAMES = {int: "an integer", float: "a number", bool: "true or false", str: "a string"}


def checked_fields(cls: type, values: Mapping[str, object], table: str) -> dict[str, Any]:
    """Return values for fields of `cls`, each of the annotated type; an integer also fits a float.

    A type with a class method `parse` reads values of all kinds. table: of `[model]`, for messages.
    Raises ShapeError with all that do not fit.
    """
    hints = typing.get_type_hints(cls)
    names = [field.name for field in fields(cls)]
    checked: dict[str, Any] = {}
    wrong: list[Problem] = []
    for name, value in values.items():
        where = f"{table}.{name}".removeprefix(".")
        allowed = typing.get_args(hints.get(name)) or (hints.get(name),)
        parse = next((kind.parse for kind in allowed if hasattr(kind, "parse")), None)
        if name not in names:
            wrong.append(
                Problem("model", where, f"no argument {shown(name)}", names_like(name, names))
            )
        elif parse is not None:
            checked[name] = parse(value)
        elif type(value) in allowed and (not isinstance(value, float) or math.isfinite(value)):
            checked[name] = value
        elif type(value) is int and float in allowed:
            checked[name] = float(value)
        else:
            expected = " or ".join(_NAMES[kind] for kind in allowed if kind in _NAMES)
            wrong.append(Problem("model", where, f"expected {expected}, got {shown(value)}"))
    if wrong:
        raise ShapeError(*wrong)
    return checked
