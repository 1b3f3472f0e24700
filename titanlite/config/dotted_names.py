"""Whether a dotted path leads to an object, by the source of its module: nothing is imported.

No torch here.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import re
import symtable
import sys
from pathlib import Path

#: Names by which a module can get attributes that it does not bind itself.
_OPAQUE = re.compile(
    rb"import \*|\bglobal |__getattr__|\b(globals|vars|exec|setattr)\(|__dict__|__path__|\.modules"
)


def unresolved(path: str) -> str:
    """Return why a dotted path ("package.module:name", "./file.py:name") surely cannot be resolved;
    "": it may be.
    """
    module_name, _, name = path.partition(":")
    if not (module_name and name):
        return "names no object: a colon comes before its name"
    first = name.partition(".")[0]
    if module_name.startswith((".", "/")):
        return _not_in_file(Path(module_name), module_name, first)
    return _not_in_package(module_name, first)


def _not_in_file(file: Path, shown: str, name: str) -> str:
    try:
        source = file.read_bytes()
    except OSError:
        return f"cannot be imported: there is no file {file.resolve()}"
    try:
        known = bound_names(source)
    except (SyntaxError, ValueError) as error:
        return f"cannot be imported: {shown} is not Python: {error}"
    if known is None or name in known:
        return ""
    return f"cannot be imported: {shown} has no {name}"


def _not_in_package(module_name: str, name: str) -> str:
    """Look for a name in an installed module, package by package from the outside."""
    locations: list[str] | None = None
    known: frozenset[str] | None = None
    file = ""
    parts = module_name.split(".")
    for depth in range(1, len(parts) + 1):
        full = ".".join(parts[:depth])
        spec = _find(full, locations)
        if spec is None:
            return f"cannot be imported: No module named {full!r}"
        if spec.origin is None or not spec.origin.endswith(".py"):
            return ""  # a module in C, or a package without a file
        file = spec.origin
        known = _bound_in(Path(file))
        locations = spec.submodule_search_locations
        if known is None:
            return ""  # it may make modules and names while it is imported
    is_module = locations is not None and _find(f"{module_name}.{name}", locations) is not None
    if known is None or name in known or is_module or name.startswith("__"):
        return ""
    return f"cannot be imported: {file} has no {name}"


def _find(full: str, locations: list[str] | None) -> importlib.machinery.ModuleSpec | None:
    """Return the spec of a module.

    locations: those of its package; `importlib.util` would import that.
    """
    if locations is None:
        try:
            return importlib.util.find_spec(full) if "." not in full else None
        except (ImportError, ValueError):
            return None
    try:
        found = (finder.find_spec(full, locations) for finder in sys.meta_path)
        return next((spec for spec in found if spec is not None), None)
    except KeyError:  # a folder without a file in a package: its path needs the import
        return importlib.machinery.ModuleSpec(full, None)


def _bound_in(file: Path) -> frozenset[str] | None:
    try:
        return bound_names(file.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return None


def bound_names(source: bytes) -> frozenset[str] | None:
    """Return the names that a module binds at its top level; None where its source does not tell.

    Raises SyntaxError, and ValueError for a zero byte.
    """
    if _OPAQUE.search(source):
        return None
    table = symtable.symtable(source.decode(), "module", "exec")
    symbols = table.get_symbols()
    return frozenset(s.get_name() for s in symbols if s.is_assigned() or s.is_imported())
