"""The log of a run, on standard output: rank 0 says everything, other ranks only warnings, with their rank."""

from __future__ import annotations

import logging
import os
import re
import sys
import textwrap
from typing import TYPE_CHECKING, Protocol, TextIO

from titanlite.utils import escape, logger

if TYPE_CHECKING:
    from titanlite.metrics.stepline import StepFigures

    _StreamHandler = logging.StreamHandler[TextIO]
else:
    _StreamHandler = logging.StreamHandler  # on Python 3.10 it takes no subscript

_RESET = "\033[0m"
#: Key of the step line -> ANSI colour.
FIELD_COLORS = {
    "step": "31",
    "loss": "32",
    "memory": "33",
    "tps": "34",
    "mfu": "35",
    "grad_norm": "36",
    "lr": "36",
    "tokens": "90",
    "left": "90",
}
_LEVEL_COLORS = {logging.WARNING: "33", logging.ERROR: "31", logging.CRITICAL: "31"}
#: Characters of a time stamp and the space after it.
_STAMP = 20
#: The name of a line of the start report, and the spaces up to its text.
_NAME = re.compile(r" {0,2}\S{1,20}( \S{1,20}){0,3} {2,}")
_FIELD = re.compile(rf"(?<!\S)({'|'.join(FIELD_COLORS)}): +\S+")


class View(Protocol):
    """What stands below the log lines of a terminal; see `titanlite.metrics.live`."""

    def tick(self, step: int) -> None:
        """After every step."""

    def add(self, figures: StepFigures, line: str) -> None:
        """After a logged step; its line is written when the view no longer shows the step."""

    def close(self, seconds: float = 2.0) -> None:
        """No more is shown, and the log is plain lines again. Waits so long for a terminal that takes nothing."""


class ConsoleHandler(_StreamHandler):
    """Log lines of one rank. `color` says whether escape codes may go to the stream.

    A record with `wrap` (`extra={"wrap": True}`) is broken between words at a terminal's width.
    While there is a `view`, a record with `figures` (`extra={"figures": StepFigures(...)}`) goes there first.
    """

    def __init__(self, rank: int, color: bool | None, stream: TextIO | None) -> None:
        self.given = stream
        super().__init__(sys.stdout if stream is None else stream)
        self.color = (wants_color(self.target()) if color is None else color) and not is_dumb()
        self.rank = rank
        self.view: View | None = None
        self.setLevel(logging.INFO if rank == 0 else logging.WARNING)
        self.setFormatter(logging.Formatter("%(message)s"))

    def target(self) -> TextIO:
        """Where lines go now."""
        return sys.stdout if self.given is None else self.given

    def emit(self, record: logging.LogRecord) -> None:
        # Whoever replaces sys.stdout later (a notebook, a test) means our lines too.
        self.stream = self.target()
        view, figures = self.view, getattr(record, "figures", None)
        if view is None or figures is None:
            super().emit(record)
            return
        try:
            view.add(figures, self.format(record))
        except Exception:
            self.handleError(record)

    def format(self, record: logging.LogRecord) -> str:
        text = super().format(record)
        if not hasattr(record, "figures"):  # of a step line, which holds numbers, and colours of our own
            text = escape(text)
        if record.levelno >= logging.WARNING:
            text = f"{record.levelname}: {text}"
        if self.rank:
            text = f"[rank {self.rank}] {text}"
        if getattr(record, "wrap", False) and self.target().isatty():
            text = _wrapped(text, _columns(self.target()))
        if self.color and record.levelno in _LEVEL_COLORS:
            text = f"\033[{_LEVEL_COLORS[record.levelno]}m{text}{_RESET}"
        stamp = logging.Formatter().formatTime(record, "%Y-%m-%d %H:%M:%S")
        return f"{stamp} {text}"


def _wrapped(text: str, columns: int) -> str:
    """`name  text` in lines of at most `columns`, broken between words; later ones begin below `text`."""
    name = _NAME.match(text)
    return textwrap.fill(
        text,
        max(columns - _STAMP, 40),
        subsequent_indent=" " * (name.end() if name else 2),
        break_long_words=False,
        break_on_hyphens=False,
    ).replace("\n", "\n" + " " * _STAMP)


def _columns(stream: TextIO) -> int:
    """Columns of the terminal; 80 if it does not know."""
    try:
        return os.get_terminal_size(stream.fileno()).columns or 80
    except (AttributeError, OSError, ValueError):
        return 80


def is_dumb() -> bool:
    """Whether the terminal takes no escape codes."""
    return os.environ.get("TERM") == "dumb"


def wants_color(stream: TextIO) -> bool:
    """A terminal, unless NO_COLOR or a dumb one; FORCE_COLOR where a launcher passes our pipe on to a terminal."""
    if os.environ.get("NO_COLOR") or is_dumb():
        return False
    return bool(os.environ.get("FORCE_COLOR")) or stream.isatty()


def setup_console(rank: int, color: bool | None = None, stream: TextIO | None = None) -> None:
    """Send the `titanlite` logger to `stream` (None: standard output). A second call replaces the first.

    Rank 0 shows INFO and up, others WARNING and up. color: None means on a terminal, unless NO_COLOR or
    FORCE_COLOR say otherwise. With TERM=dumb there are none.
    """
    for handler in _handlers():
        logger.removeHandler(handler)
    logger.addHandler(ConsoleHandler(rank, color, stream))
    logger.setLevel(logging.INFO)
    # Libraries that call logging.basicConfig would otherwise print every line a second time.
    logger.propagate = False


def colorize(line: str) -> str:
    """The step line with each field in the colour of its key, where `setup_console` decided for colours."""
    if not any(handler.color for handler in _handlers()):
        return line
    return _FIELD.sub(lambda match: f"\033[{FIELD_COLORS[match[1]]}m{match[0]}{_RESET}", line)


def console_handler() -> ConsoleHandler | None:
    """The handler of `setup_console`, if that was called."""
    return next(iter(_handlers()), None)


def _handlers() -> list[ConsoleHandler]:
    return [handler for handler in logger.handlers if isinstance(handler, ConsoleHandler)]
