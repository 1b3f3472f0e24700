"""What a file of somebody else may not do: run code here, read variables of the environment, read
other files.

A trusted value comes from the user: a TOML file that a command names, a flag, a call from Python. A
foreign value is out of a checkpoint, a file of weights or the config that a run kept. Foreign
values that would run code become `Claim`s, and `admit` refuses them unless the user gave
`--trust-code`. No torch here.
"""

from __future__ import annotations

import enum
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from titanlite.config.errors import Problem, refuse
from titanlite.config.toml import quote
from titanlite.utils import say

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
    """Return the origin of what a checkpoint or a kept config holds, given `--trust-code` or
    not.
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


def refusals(claims: Sequence[Claim], origin: Origin) -> list[Problem]:
    """Return the problems of foreign claims, as the only gate; print those that the user allows."""
    if origin is Origin.FOREIGN:
        return [
            Problem(
                "untrusted",
                claim.key,
                f"{quote(claim.value)} {claim.effect}; titanlite does not trust this file",
                _HINT,
                claim.place,
            )
            for claim in claims
        ]
    is_first = os.environ.get("RANK", "0") == "0"  # the other ranks have the same to say
    if origin is Origin.TRUSTED and is_first:
        for claim in claims:
            say(f"{FLAG}: {claim.place}: {claim.key} = {quote(claim.value)} {claim.effect}")
    return []


def admit(claims: Sequence[Claim], origin: Origin) -> None:
    """Do as `refusals`, and raise ConfigError if there are problems."""
    refuse(refusals(claims, origin))


def add_argument(add: Callable[..., Any]) -> None:
    """Add `--trust-code` to a command that reads checkpoints, weights or kept configs."""
    add(FLAG, action="store_true", help=_HELP)
