"""Paths as a published file shows them. No torch here."""

from __future__ import annotations

import re

#: How a place on a machine, or in a store that is not open to all, begins.
_PRIVATE = re.compile(
    r"[/~$]|\.\.[/\\]|[a-z]:[/\\]|\\\\|(?!https?:|hf:)[a-z][\w+.-]*://", re.IGNORECASE
)


def public_place(place: str) -> str:
    """Return a place, only its last part if it is private."""
    return f"…/{last_part(place)}" if _PRIVATE.match(place) else place


def last_part(path: str) -> str:
    """Return the last part of a path or a URL."""
    return re.split(r"[/\\]", path.rstrip("/\\"))[-1]
