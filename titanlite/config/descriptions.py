"""Keys in words, for pages and messages: what a key means, and what it takes."""

from __future__ import annotations

import ast
import sys
from functools import cache
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from titanlite.config.key_types import base, inner_section, members
from titanlite.config.run_sections import Section
from titanlite.config.toml import quote


@cache
def _classes(module: str) -> dict[str, list[ast.stmt]]:
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
        return _describe_list(*get_args(kind))
    if get_origin(kind) is dict:
        return "a table"
    bounds = []
    for meta in metas:
        for limit, sign in _LIMITS.items():
            number = getattr(meta, limit)
            if number is not None:
                bounds.append(f"{sign} {number}")
    if any(meta.min_length for meta in metas):
        bounds.append("that is not empty")
    return f"{_PLAIN.get(kind, 'a value')} {' and '.join(bounds)}".rstrip()


def _describe_list(item: Any) -> str:
    if section := inner_section(item):
        return f"an array of tables with {', '.join(section.__struct_fields__)}"
    if get_origin(item) is Literal:
        return f"a list of {', '.join(map(quote, get_args(item)))}"
    if item in _MANY:
        return f"a list of {_MANY[item]}"
    return f"a list whose items are each {describe(item)}"
