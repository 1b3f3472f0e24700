"""Fields of a model's arguments: what each one tells about itself, and values from a file checked
against them. No torch here.

A field is a part of the shape that decides as it stands, and a number is positive. One that is not
says so where it is declared, by `argument`. So what compares or checks arguments names none.
"""

from __future__ import annotations

import math
import typing
from collections.abc import Mapping
from dataclasses import Field, field, fields
from typing import Any

from titanlite.config.errors import Problem
from titanlite.models.spec import ShapeError, names_like, shown

#: The argument that a run sets to the length of its sequences, in the arguments of any model.
LENGTH = "max_seq_len"


def argument(
    default: Any, *, decides: str | None = None, of_training: bool = False, least: int = 1
) -> Any:
    """Declare an argument that is no plain part of the shape.

    decides: the attribute that stands for it where models are compared, "" if others do.
    of_training: it changes neither weights nor logits; runs that differ in it resume each other's
    checkpoints. least: 0 for a number that may be zero.
    """
    told: dict[str, Any] = {"of_training": of_training, "least": least}
    if decides is not None or of_training:
        told["decides"] = decides or ""
    return field(default=default, metadata=told)


def is_of_training(one: Field[Any]) -> bool:
    """Return whether weights mean the same, whatever the argument is."""
    return bool(one.metadata.get("of_training", one.name == LENGTH))


def deciding(args: Any) -> dict[str, Any]:
    """Return argument → value of all that decides tensors or logits, with defaults worked out.

    Arguments with a method of this name answer themselves.
    """
    if hasattr(args, "deciding"):
        return dict(args.deciding())
    found = {}
    for one in fields(args):
        attribute = one.metadata.get("decides", one.name)
        if attribute and not is_of_training(one):
            found[one.name] = getattr(args, attribute)
    return found


def out_of_range(args: Any) -> list[str]:
    """Return what is wrong with numbers by themselves."""
    wrong = []
    for one in fields(args):
        value = getattr(args, one.name)
        if type(value) not in (int, float):
            continue
        may_be_zero = one.metadata.get("least", 1) == 0
        if not (0 < value < math.inf or value == 0 and may_be_zero):
            limit = "not be negative" if may_be_zero else "be positive"
            wrong.append(f"{one.name} must {limit}, got {value}")
    return wrong


_NAMES = {int: "an integer", float: "a number", bool: "true or false", str: "a string"}


def checked_fields(cls: type, values: Mapping[str, object], table: str) -> dict[str, Any]:
    """Return values for fields of `cls`, each of the annotated type; an integer also fits a float.

    A type with a class method `parse` reads values of all kinds. table: of `[model]`, for messages.
    Raises ShapeError with all that do not fit.
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
