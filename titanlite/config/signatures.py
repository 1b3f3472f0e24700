"""What a class takes, read from its source: nothing is imported, and no code of it runs."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

#: Modules and base classes that are followed from a name to its definition.
_STEPS = 8


@dataclass(frozen=True)
class Signature:
    """The arguments of a class, without `self`."""

    #: Names that may be given by keyword, in order.
    names: tuple[str, ...]
    #: Those without a default.
    required: tuple[str, ...]
    #: Whether it takes any further name.
    open: bool


@cache
def class_signature(path: str) -> Signature | None:
    """Return the signature of the class that a dotted path names; None where the source does not
    tell.

    path: "package.module:Name" or "/file.py:Name".
    """
    module, _, name = path.partition(":")
    return _signature_in(_file_of(module), name, _STEPS)


def names_class(path: str) -> bool:
    """Return whether a dotted path names a class, as far as the source tells."""
    module, _, name = path.partition(":")
    return _definition(_file_of(module), name, _STEPS) is not None


def _file_of(module: str) -> Path | None:
    """Return the file of a module, which is a dotted name or a path."""
    if module.startswith((".", "/")):
        file = Path(module)
        return file if file.is_file() else None  # a device would have no end
    parts = module.split(".")
    for folder in sys.path:
        place = Path(folder or ".").joinpath(*parts)
        for file in (place / "__init__.py", place.with_suffix(".py")):
            if file.is_file():
                return file
    return None


@cache
def _parsed(file: Path) -> ast.Module | None:
    try:
        return ast.parse(file.read_bytes())
    except (OSError, ValueError, SyntaxError, RecursionError):
        return None


def _definition(file: Path | None, name: str, steps: int) -> tuple[Path, ast.ClassDef] | None:
    """Return the class of a name in a file, and the file that defines it: imports are followed."""
    if file is None or steps == 0:
        return None
    tree = _parsed(file)
    if tree is None:
        return None
    for node in _statements(tree.body):
        if isinstance(node, ast.ClassDef) and node.name == name:
            return file, node
        if isinstance(node, ast.ImportFrom):
            for alias in node.names:
                if (alias.asname or alias.name) == name:
                    return _definition(_imported(file, node), alias.name, steps - 1)
    return None


def _statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield the statements of a module, those within `if` and `try` included."""
    for node in body:
        yield node
        if isinstance(node, ast.If | ast.Try):
            yield from _statements([*node.body, *node.orelse])


def _imported(file: Path, node: ast.ImportFrom) -> Path | None:
    """Return the file that a `from … import` reads."""
    if not node.level:
        return _file_of(node.module or "")
    folder = file.parents[node.level - 1]
    place = folder.joinpath(*(node.module or "").split("."))
    files = (place / "__init__.py", place.with_suffix(".py"))
    return next((found for found in files if found.is_file()), None)


def _signature_in(file: Path | None, name: str, steps: int) -> Signature | None:
    found = _definition(file, name, steps)
    if found is None or steps == 0:
        return None
    where, definition = found
    for node in definition.body:
        if isinstance(node, ast.FunctionDef) and node.name == "__init__":
            return _of_function(node)
    for base in definition.bases:
        if isinstance(base, ast.Name):
            return _signature_in(where, base.id, steps - 1)
    return None


def _of_function(node: ast.FunctionDef) -> Signature:
    args = node.args
    positional = [argument.arg for argument in (*args.posonlyargs, *args.args)][1:]  # without self
    with_default = len(args.defaults)
    needed = positional[: max(len(positional) - with_default, 0)]
    keywords = [argument.arg for argument in args.kwonlyargs]
    for name, default in zip(keywords, args.kw_defaults, strict=True):
        if default is None:
            needed.append(name)
    return Signature((*positional, *keywords), tuple(needed), args.kwarg is not None)
