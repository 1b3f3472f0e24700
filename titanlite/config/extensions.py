"""Keys that name an object of yours by a dotted path: "package.module:name", or "./file.py:name" beside the TOML file.

Importing this module needs no torch. A config is loaded without an import of such an object; only a model is imported,
since its sizes are checked. `load_functions` imports the others before any work starts.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from titanlite.config.errors import ConfigError, Problem
from titanlite.utils import is_dotted, resolve_as, unresolved

if TYPE_CHECKING:
    from titanlite.config.loaded import LoadedConfig

#: Key → the arguments with which its function is called.
FUNCTIONS = {
    "optimizer.name": ("parameters", "settings", "device"),
    "training.loss": ("logits", "labels"),
    "training.dataset": (),
    "validation.dataset": (),
}
KEYS = ("job.callbacks", "model.name", *FUNCTIONS)
#: Keys whose paths, if they begin with a dot, are relative to the file that names them.
ANCHORED = (*KEYS, "model.hf_config")
HINT = 'name it as "package.module:name", or as "./file.py:name" beside the TOML file'


def anchored(path: str, folder: Path) -> str:
    """Return a dotted path with its file made absolute: in `folder`, else in the working directory if it is there."""
    file, colon, name = path.partition(":")
    if not file.startswith("."):
        return path
    places = [os.path.abspath(base / file) for base in (folder, Path())]
    return f"{next(filter(os.path.exists, places), places[0])}{colon}{name}"


def dotted_paths(config: LoadedConfig) -> Iterator[tuple[str, str]]:
    """Yield each dotted path in a config with its key."""
    for key in KEYS:
        value = config.value(key)
        yield from ((key, path) for path in ([value] if isinstance(value, str) else value) if is_dotted(path))


def missing(config: LoadedConfig) -> list[tuple[str, str, str, str]]:
    """Find dotted paths that surely lead nowhere, without an import: (code, key, message, remedy)."""
    foreign = {claim.key for claim in config.claims}  # such a file is not even read
    paths = [(key, path) for key, path in dotted_paths(config) if key != "model.name" and key not in foreign]
    found = ((key, path, unresolved(path)) for key, path in paths)
    return [("unresolved", key, f"{path!r} {reason}", HINT) for key, path, reason in found if reason]


def load_function(key: str, path: str) -> Callable[..., Any]:
    """Return the function that a key of `FUNCTIONS` names. Raises ValueError if it cannot be called as it will be."""
    arguments = FUNCTIONS[key]

    def accept(found: Any) -> bool:
        try:
            inspect.signature(found).bind(*arguments)
        except (TypeError, ValueError):
            return False
        return True

    function: Callable[..., Any] = resolve_as(path, accept, f"a function to call with ({', '.join(arguments)})")
    return function


def load_functions(config: LoadedConfig) -> None:
    """Import every function that a config names. Raises ConfigError with all that cannot be used."""
    problems = []
    for key, path in dotted_paths(config):
        if key in FUNCTIONS:
            try:
                load_function(key, path)
            except ValueError as error:
                problems.append(Problem(config.place(key), key, str(error), HINT, code="unresolved"))
    if problems:
        raise ConfigError(problems)
