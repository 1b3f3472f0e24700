"""What a file of somebody else may not do: run code here, read variables of the environment, read
other files.

A trusted value comes from the user: a TOML file that a command names, a flag, a call from Python. A
foreign value is out of a checkpoint, a file of weights or the config that a run kept. Foreign
values that would run code become `Claim`s, and `admit` refuses them unless the user gave
`--trust-code`. No torch here.
"""

from __future__ import annotations

import enum
import importlib.util
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from titanlite.config import extensions
from titanlite.config.errors import ConfigError, Problem
from titanlite.config.toml import quote
from titanlite.utils import escape, is_dotted

FLAG = "--trust-code"
_HINT = f"give {FLAG} if you trust the author of that file (SECURITY.md)"
_HELP = (
    "allow what a checkpoint or a kept config names: code to import, variables, files; each is "
    "printed before"
)


class Origin(enum.Enum):
    """Who wrote a value."""

    #: The user: a TOML file that a command names, a flag, a call from Python.
    OWN = "own"
    #: A checkpoint, a file of weights, or the config that a run kept.
    FOREIGN = "foreign"
    #: As FOREIGN, and the user gave `--trust-code`.
    TRUSTED = "trusted"


def foreign(trust_code: bool) -> Origin:
    """Return the origin of what a checkpoint or a kept config holds.

    trust_code: the user gave `--trust-code`.
    """
    return Origin.TRUSTED if trust_code else Origin.FOREIGN


@dataclass(frozen=True)
class Claim:
    """A foreign value that would run code here, or read more than its own file."""

    #: The file that holds it, with the line where that is known.
    place: str
    key: str
    value: str
    #: What it would do, as "imports /tmp/evil.py".
    effect: str

    def refusal(self) -> Problem:
        """Return the problem that names value, file and flag."""
        message = f"{quote(self.value)} {self.effect}; titanlite does not trust this file"
        return Problem(self.place, self.key, message, _HINT, code="untrusted")

    def announcement(self) -> str:
        """Return the line that the user reads before the value has its effect."""
        return f"{FLAG}: {self.place}: {self.key} = {quote(self.value)} {self.effect}"


def refusals(claims: Sequence[Claim], origin: Origin) -> list[Problem]:
    """Return the problems of foreign claims; print those that the user allows.

    This is the only gate.
    """
    if origin is Origin.FOREIGN:
        return [claim.refusal() for claim in claims]
    is_first = os.environ.get("RANK", "0") == "0"  # the other ranks have the same to say
    if origin is Origin.TRUSTED and is_first:
        for claim in claims:
            print(escape(claim.announcement()), file=sys.stderr, flush=True)
    return []


def admit(claims: Sequence[Claim], origin: Origin) -> None:
    """Do as `refusals`, and raise ConfigError with all problems if there are some."""
    if problems := refusals(claims, origin):
        raise ConfigError(problems)


def code_claim(place: str, key: str, path: str, written: str = "") -> Claim:
    """Return the claim of a dotted path. written: as the file has it, if that is not the same."""
    return Claim(place, key, written or path, f"imports {_imported(path)}")


def variable_claim(place: str, key: str, name: str) -> Claim:
    """Return the claim of an environment variable in a value."""
    return Claim(place, key, f"${{{name}}}", f"reads the environment variable {name}")


def file_claim(place: str, key: str, written: str, path: Path) -> Claim:
    """Return the claim of a config file that another one extends."""
    return Claim(place, key, written, f"reads the file {path}")


def config_claims(place: str, key: str, written: Any, value: Any) -> Iterator[Claim]:
    """Yield what the value of a config's key would run.

    place: its file and line. written: the value as the file has it, with relative paths.
    """
    pairs = zip(_dotted_paths(key, written), _dotted_paths(key, value), strict=True)
    for shown, path in pairs:
        yield code_claim(place, key, path, shown)
    if key in _COMPILED and value:
        folder = os.path.abspath(os.path.expanduser(value))
        yield Claim(place, key, value, f"runs compiled code out of {folder}")


def add_argument(add: Callable[..., Any]) -> None:
    """Add `--trust-code` to a command that reads checkpoints, weights or kept configs, by its
    `add_argument`.
    """
    add(FLAG, action="store_true", help=_HELP)


#: Keys with tables, whose `name` may be a dotted path.
_TABLES = ("data.source", "validation.sources")
#: Keys with the name of a module.
_MODULES = ("experimental.custom_import",)
#: Keys with a folder of compiled code, which torch loads and runs.
_COMPILED = ("compile.cache_dir",)


def _dotted_paths(key: str, value: Any) -> Iterator[str]:
    """Yield the dotted paths and modules in the value of a key."""
    if key in extensions.KEYS:
        names = [value] if isinstance(value, str) else value or []
        yield from (name for name in names if is_dotted(name))
    elif key in _TABLES:
        names = [table.get("name") for table in value or []]
        yield from (name for name in names if name and is_dotted(name))
    elif key in _MODULES and value:
        yield value


def _imported(path: str) -> str:
    """Return what an import of a dotted path would run, for people. It imports nothing."""
    name = path.partition(":")[0]
    if name.startswith((".", "/")):
        return f"the file {Path(name).resolve()}"
    package = name.partition(".")[0]
    try:
        spec = importlib.util.find_spec(package) if package else None
    except (ImportError, ValueError):
        spec = None
    places: list[str | None] = []
    if spec:
        places = [spec.origin, *(spec.submodule_search_locations or ())]
    where = next((place for place in places if place), None)
    return f"the module {name} ({where or 'which is not found here'})"
