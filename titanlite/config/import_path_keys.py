"""Keys that name an object of yours by a dotted path: "package.module:name", or "./file.py:name"
beside the TOML file.

A config is loaded without an import of such an object. Only a model is imported, since its sizes
are checked. `titanlite.config.own_functions` imports the others before any work starts.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from titanlite.config.errors import Problem
from titanlite.utils import is_dotted

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
    """Return a dotted path with an absolute file: in `folder`, else in the working directory."""
    file, colon, name = path.partition(":")
    if not file.startswith("."):
        return path
    places = [os.path.abspath(base / file) for base in (folder, Path())]
    return f"{next(filter(os.path.exists, places), places[0])}{colon}{name}"


def dotted_paths(config: LoadedConfig) -> Iterator[tuple[str, str]]:
    """Yield each dotted path in a config with its key."""
    for key in KEYS:
        value = config.value(key)
        paths = [value] if isinstance(value, str) else value
        for path in paths:
            if is_dotted(path) or key == "job.callbacks":
                yield key, path


def missing(config: LoadedConfig) -> Iterator[Problem]:
    """Find dotted paths without their file or package; `load_functions` finds all others."""
    foreign = {claim.key for claim in config.claims}  # such a file is not even looked for
    for key, path in dotted_paths(config):
        module, _, name = path.partition(":")
        package = module.partition(".")[0]
        reason = ""
        if not (module and name):
            reason = "names no object: a colon comes before its name"
        elif module.startswith((".", "/")):
            if not os.path.isfile(module):
                reason = f"cannot be imported: there is no file {os.path.realpath(module)}"
        elif package not in sys.modules and importlib.util.find_spec(package) is None:
            reason = f"cannot be imported: No module named {package!r}"
        if reason and key != "model.name" and key not in foreign:
            yield Problem("unresolved", key, f"{path!r} {reason}", HINT)
