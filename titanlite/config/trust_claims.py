"""Effects that the values of a foreign file would have here, for `titanlite.config.trust`."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from titanlite.config import import_path_keys
from titanlite.config.trust import Claim
from titanlite.utils import is_dotted

#: Keys with tables, whose `name` may be a dotted path.
_TABLES = ("data.source", "validation.sources")
#: Keys with a folder of compiled code, which torch loads and runs.
_COMPILED = ("compile.cache_dir",)
#: Keys with a folder of task files, which may name functions that run.
_TASK_FILES = ("eval.include_path",)


def code_claim(place: str, key: str, path: str, written: str = "") -> Claim:
    """Return the claim of a dotted path. written: as in the file, if different.

    Nothing is imported.
    """
    name = path.partition(":")[0]
    module = f"the module {name}"
    if name.startswith((".", "/")):
        module = f"the file {Path(name).resolve()}"
    return Claim(place, key, written or path, f"imports {module}")


def config_claims(place: str, key: str, written: Any, value: Any) -> Iterator[Claim]:
    """Yield what a config's value would run.

    place: file and line. written: as the file has it, with relative paths.
    """
    pairs = zip(_dotted_paths(key, written), _dotted_paths(key, value), strict=True)
    for shown, path in pairs:
        yield code_claim(place, key, path, shown)
    if key in _COMPILED and value:
        folder = os.path.abspath(os.path.expanduser(value))
        yield Claim(place, key, value, f"runs compiled code out of {folder}")
    if key in _TASK_FILES and value:
        folder = os.path.abspath(os.path.expanduser(value))
        yield Claim(place, key, value, f"runs functions that task files below {folder} name")


def _dotted_paths(key: str, value: Any) -> Iterator[str]:
    if key in import_path_keys.KEYS:
        names = [value] if isinstance(value, str) else value or []
        yield from (name for name in names if is_dotted(name))
    elif key in _TABLES:
        names = [table.get("name") for table in value or []]
        yield from (name for name in names if name and is_dotted(name))
