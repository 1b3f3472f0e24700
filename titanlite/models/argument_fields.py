"""Fields of a model's arguments: what each one tells about itself, and values from a file checked
against them. No torch here.

A field is a part of the shape that decides as it stands, and a number is positive. One that is not
says so where it is declared, by `argument` or by its default, which may be zero or negative. So
what compares or checks arguments names none.
"""

from __future__ import annotations

import functools
import math
import typing
from collections.abc import Mapping
from dataclasses import field, fields
from typing import Any

from titanlite.config.errors import Problem
from titanlite.models.spec import ShapeError, names_like, shown

#: The argument that a run sets to the length of its sequences, in the arguments of any model.
LENGTH = "max_seq_len"


def argument(
    default: Any,
    *,
    decides: str | None = None,
    of_training: bool = False,
    may_be_zero: bool = False,
    came_later: bool = False,
) -> Any:
    """Declare an argument that is no plain part of the shape; subclasses inherit the declaration.

    decides: the attribute that models are compared by, "" if others are. of_training: it changes
    neither weights nor logits; runs that differ in it resume each other's checkpoints. came_later:
    models of older versions, and files of Hugging Face, have the default without saying so. Their
    checkpoints are resumed, and a model with another value has no form there.
    """
    told: dict[str, Any] = {}
    if may_be_zero:
        told["may_be_zero"] = True
    if came_later:
        told["came_later"] = True
    if of_training:
        told["of_training"] = True
    if decides is not None or of_training:
        told["decides"] = decides or ""
    return field(default=default, metadata=told)


@functools.cache
def declared(cls: type, name: str) -> Mapping[str, Any]:
    """Return what an argument tells about itself, see `argument`."""
    found: dict[str, Any] = {"of_training": name == LENGTH, "came_later": False, "decides": name}
    for base in reversed(cls.__mro__):
        declared = vars(base).get("__dataclass_fields__", {}).get(name)
        found.update(declared.metadata if declared is not None else {})
        default = vars(base).get(name)
        if isinstance(default, (int, float)):
            found["is_signed"] = default < 0
            if default == 0:
                found["may_be_zero"] = True
    return found


def deciding(args: Any) -> dict[str, Any]:
    """Return argument → value of all that decides tensors or logits, with defaults worked out.

    Arguments with a method of this name answer themselves.
    """
    if hasattr(args, "deciding"):
        return dict(args.deciding())
    found = {}
    cls: Any = type(args)
    for one in fields(args):
        attribute = declared(cls, one.name)["decides"]
        if attribute and one.name != LENGTH:
            found[one.name] = getattr(args, attribute)
    return found


def out_of_range(args: Any) -> list[str]:
    """Return what is wrong with numbers by themselves."""
    wrong = []
    cls: Any = type(args)
    for one in fields(args):
        value = getattr(args, one.name)
        told = declared(cls, one.name)
        if type(value) not in (int, float) or told.get("is_signed"):
            continue
        may_be_zero = "may_be_zero" in told
        if not (0 < value < math.inf or value == 0 and may_be_zero):
            limit = "not be negative" if may_be_zero else "be positive"
            wrong.append(f"{one.name} must {limit}, got {value}")
    return wrong


_NAMES = {int: "an integer", float: "a number", bool: "true or false", str: "a string"}


def checked_fields(cls: type, values: Mapping[str, object], table: str) -> dict[str, Any]:
    """Return values for fields of `cls`, each of the annotated type; an integer also fits a float.

    A type's class method `parse` reads its values. table: of `[model]`, for messages. Raises
    ShapeError with all that do not fit.
    """
    hints = typing.get_type_hints(cls)
    names = [one.name for one in fields(cls)]
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
