"""The objects that dotted paths name. Their modules are imported."""

from __future__ import annotations

import importlib
import re
import sys
import types
from collections.abc import Callable
from functools import reduce
from importlib.machinery import SourceFileLoader
from pathlib import Path
from typing import Any


def resolve(path: str) -> Any:
    """Return the object that a dotted path names. Raises ValueError naming the path.

    A path that begins with a dot or a slash is a file, relative to the working directory.
    """
    module_name, _, name = path.partition(":")
    if not (module_name and name):
        raise ValueError(f"{path!r} names no object: a colon comes before its name")
    try:
        if module_name.startswith((".", "/")):
            module = _module_of_file(Path(module_name).resolve())
        else:
            module = importlib.import_module(module_name)
    except Exception as error:
        is_missing = isinstance(error, ModuleNotFoundError | FileNotFoundError)
        lead = "" if is_missing else f"{type(error).__name__}: "
        raise ValueError(f"{path!r} cannot be imported: {lead}{error}") from error
    try:
        return reduce(getattr, name.split("."), module)
    except AttributeError:
        raise ValueError(
            f"{path!r} cannot be imported: {getattr(module, '__file__', None) or module_name} has "
            f"no {name}"
        ) from None


def resolve_as(path: str, accept: Callable[[Any], bool], kind: str) -> Any:
    """As `resolve`; raise ValueError also where `accept` refuses the object.

    kind: what it must be, with an article, for messages.
    """
    found = resolve(path)
    if not accept(found):
        raise ValueError(f"{path!r} is {found!r:.80}, and not {kind}")
    return found


def module_name(name: str) -> str:
    """Return a module's name for messages: of a module from a file, the file's."""
    return re.sub(r"^titanlite_(.+)_\d+$", r"\1", name)


def _module_of_file(file: Path) -> Any:
    if not file.is_file():
        raise FileNotFoundError(f"there is no file {file}")
    name = f"titanlite_{file.stem}_{abs(hash(file))}"
    if name not in sys.modules:
        loader = SourceFileLoader(name, str(file))
        module = sys.modules[name] = types.ModuleType(name)
        module.__file__ = str(file)
        try:
            loader.exec_module(module)
        except BaseException:
            del sys.modules[name]
            raise
    return sys.modules[name]
