"""What the terminal of a stream can show."""

from __future__ import annotations

import io
import os
from typing import TextIO


def is_terminal(stream: TextIO) -> bool:
    """Return whether a stream is a terminal that still takes text."""
    return isinstance(stream, io.TextIOWrapper) and not stream.closed and stream.isatty()


def terminal_width(stream: TextIO) -> int:
    """Return the columns of a person's terminal; 0 for other streams."""
    if not is_terminal(stream):
        return 0
    try:
        return os.get_terminal_size(stream.fileno()).columns
    except (OSError, ValueError):
        return 0


def is_dumb() -> bool:
    """Return whether the terminal takes no escape codes."""
    return os.environ.get("TERM") == "dumb"


def wants_color(stream: TextIO) -> bool:
    """Return True for a terminal, unless NO_COLOR is set or it is dumb; also with FORCE_COLOR.

    FORCE_COLOR is for launchers that pass our pipe on to a terminal.
    """
    if os.environ.get("NO_COLOR") or is_dumb():
        return False
    return bool(os.environ.get("FORCE_COLOR")) or stream.isatty()
